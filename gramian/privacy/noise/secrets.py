"""The secret key of a private run, the counter of its releases, and the files that store them.

A release is one noised sum that leaves the process. Its noise is a function of (key, release number, element), so a number that
was begun is never given to another sum: the counter is written to its file before the noise exists.
"""

import contextlib
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch

from gramian.core.durable_files import remove_temporaries, replace_file, replacing
from gramian.core.errors import GramianError

KEY_BYTES = 32
FORMAT = 1
"""Version of the format of the counter file."""


class Secrets:
    """A 256-bit key from the operating system, and the independent keys derived from it.

    `repr` does not show the key; only `state_dict` returns it, for `save_private`. Copying and pickling raise, and so does use
    in a forked process: two processes with one key would draw the same noise for different sums. The processes of one run share
    a key on purpose, each through its own `load_state_dict`.

    Args:
        insecure_reproducible: True derives the key from `seed`, which anyone can guess: for tests. `state_dict` records it.
        seed: seed of the key, only with `insecure_reproducible`; None: 0.
    """

    def __init__(self, *, insecure_reproducible: bool = False, seed: int | None = None) -> None:
        if seed is not None and not insecure_reproducible:
            raise GramianError("seed: a seed gives no secret; expected insecure_reproducible=True beside it")
        if seed is not None and not isinstance(seed, int):
            raise GramianError(f"seed: {seed!r}; expected an integer")
        self.insecure_reproducible = insecure_reproducible
        self._process = os.getpid()
        if insecure_reproducible:
            self._key = hashlib.blake2b(b"gramian insecure %d" % (seed or 0), digest_size=KEY_BYTES).digest()
        else:
            self._key = os.urandom(KEY_BYTES)

    @property
    def noise_key(self) -> bytes:
        """32-byte stream-cipher key of the noise: the nonce is the release number, the place in the stream the element."""
        return self.subkey("noise")

    @property
    def sampling_key(self) -> bytes:
        """32-byte stream-cipher key of the Poisson draws: the nonce is the draw number, the place in the stream the record."""
        return self.subkey("sampling")

    def subkey(self, label: str) -> bytes:
        """A 32-byte key for one purpose: BLAKE2b of the label, keyed with the secret; a `GramianError` in a forked process."""
        self.refuse_forks()
        return hashlib.blake2b(label.encode(), digest_size=32, key=self._key, person=b"gramian subkey").digest()

    def refuse_forks(self) -> None:
        """Raise a `GramianError` in a process that was forked from the one with the key."""
        if os.getpid() != self._process:
            raise GramianError(
                f"engine: its key belongs to process {self._process}, from which this one was forked, and both would draw the "
                "same noise; expected a PrivacyEngine made in this process"
            )

    def renew(self) -> None:
        """Replace the key by a new random one, so that no noise is drawn again with the old; a key from a seed stays."""
        if not self.insecure_reproducible:
            self._key = os.urandom(KEY_BYTES)

    def state_dict(self) -> dict[str, Any]:
        """The secret key as uint8 [32], and `insecure_reproducible`: for `save_private`, or to send to other ranks."""
        return {
            "key": torch.tensor(list(self._key), dtype=torch.uint8),
            "insecure_reproducible": self.insecure_reproducible,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the key by that of a `state_dict`, from a checkpoint or from rank 0.

        Raises:
            GramianError: for a damaged state, or a key from a seed where this object has a secret one.
        """
        key, insecure = state.get("key"), state.get("insecure_reproducible")
        if not isinstance(key, torch.Tensor) or key.dtype != torch.uint8 or list(key.shape) != [KEY_BYTES]:
            raise GramianError(f"key: missing or of another shape; expected a uint8 tensor of {KEY_BYTES} in the state")
        if not isinstance(insecure, bool):
            raise GramianError(f"insecure_reproducible: {insecure!r} in the state; expected True or False")
        if insecure and not self.insecure_reproducible:
            raise GramianError(
                "insecure_reproducible: the key of the state comes from a seed, which anyone can guess; expected the state of "
                "a run with a secret key, or an engine with insecure_reproducible=True"
            )
        self._key, self._process = bytes(key.tolist()), os.getpid()
        self.insecure_reproducible = insecure

    def __repr__(self) -> str:
        return f"Secrets(insecure_reproducible={self.insecure_reproducible})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GramianError("secrets: copies and pickles are refused; expected state_dict() in save_private")


class ReleaseCounter:
    """Gives each release (one noised sum) a number of its own, and counts how many were begun.

    `spent` is the number of releases begun so far, in this process or, according to the bound file, in an earlier one. The
    accountant computes ε from it. It only grows: beginning a number a second time, in a replay, adds nothing.
    """

    def __init__(self) -> None:
        self._next = 0
        self._spent = self._reserved = 0
        self._path: Path | None = None
        self.about: Any = None
        """State of the accounting when the last release was begun, here or according to the bound file; None: not known."""

    @property
    def spent(self) -> int:
        """Number of distinct releases (noised sums) begun so far."""
        return self._spent

    @property
    def released(self) -> int:
        """The number that the next release (noised sum) gets."""
        return self._next

    def bind(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        """Store `spent`, the number of releases begun, in a file from now on; the larger number of file and object counts.

        One process of a run binds (rank 0). The next release gets a number past all in the file, unless `restore` is called
        with replay. A resumed run passes `must_exist`: without the file it is not known which numbers were begun.

        Raises:
            GramianError: if the file is missing although it must exist, is damaged, or cannot be written.
        """
        path = Path(path)
        remove_temporaries(path)
        recorded, about = _read_mark(path)
        if recorded < 0 and must_exist:
            raise GramianError(f"{path}: no such file; expected the release counter that lies beside the checkpoint")
        mark = max(self._spent, recorded)
        if recorded >= self._spent:
            self.about = about
        if mark > recorded:
            _write_mark(path, mark, self.about)
        self._path, self._spent, self._next, self._reserved = path, mark, max(self._next, mark), 0

    @property
    def bound(self) -> bool:
        """True if the number of releases begun is stored in a file."""
        return self._path is not None

    def reserve(self, about: Any = None) -> None:
        """Make the count durable that the next release will have, with `about`, the state of the accounting in plain values.

        Nothing without a bound file, or in a replay; else two fsyncs and a rename, up to a few milliseconds on a disk.

        Raises:
            GramianError: if the file cannot be written, or another process has counted in it.
        """
        if self._path is not None and self._next + 1 > self._spent:
            if _read_mark(self._path)[0] > max(self._spent, self._reserved):
                raise GramianError(
                    f"{self._path}: another process has begun releases of this run; expected one process at a time"
                )
            _write_mark(self._path, self._next + 1, about)
            self._reserved = self._next + 1

    def begin(self, about: Any = None) -> int:
        """Begin a release (one noised sum) and return its number, after `reserve` unless that was called before.

        Raises:
            GramianError: as `reserve`; nothing has begun then.
        """
        release = self._next
        if release + 1 > self._spent:
            if release + 1 > self._reserved:
                self.reserve(about)
            self._spent, self.about = release + 1, about
        self._next = release + 1
        return release

    def restore(self, released: int, replay: bool, spent: int = 0) -> None:
        """Set the counter after a resume, a rollback or a skipped step.

        Args:
            released: `released` at the checkpoint.
            replay: True if the steps that follow are, bit for bit, those that followed the checkpoint before: the numbers from
                `released` on are given again and counted once. False in every other case: the next number is past all begun.
            spent: `spent` at the checkpoint; a higher count in this object or in the bound file stays.

        Raises:
            GramianError: if `released` is negative, or the bound file cannot be read or written.
        """
        if released < 0:
            raise GramianError(f"released: {released}; expected at least 0")
        recorded = 0 if self._path is None else _read_mark(self._path)[0]
        mark = max(self._spent, spent, released, recorded)
        if self._path is not None and mark > recorded:
            _write_mark(self._path, mark, self.about)
        self._spent = mark
        self._next = released if replay else mark

    def state_dict(self) -> dict[str, int]:
        """{"released": number of the next release, "spent": number of releases begun}, as plain integers."""
        return {"released": self._next, "spent": self._spent}

    def load_state_dict(self, state: dict[str, int], *, replay: bool = False) -> None:
        """Set the counter from a `state_dict`; `replay`: numbers from its `released` on are given again (see `restore`).

        Raises:
            GramianError: unless the state has two counts, `released` no larger than `spent`.
        """
        released, spent = state.get("released"), state.get("spent")
        if not is_count(released) or not is_count(spent) or released > spent:
            raise GramianError(
                f"release counter: the state has released={released!r}, spent={spent!r}; expected integers, the first no larger"
            )
        self.restore(released, replay, spent)

    def move_on(self) -> None:
        """End a replay: the next number is the first that was never begun."""
        self._next = self._spent

    def __repr__(self) -> str:
        return f"ReleaseCounter(released={self._next}, spent={self._spent}, path={str(self._path) if self._path else None})"


def is_count(value: Any) -> TypeGuard[int]:
    """True for an integer of at least 0; False for True and False."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def save_private(path: str | os.PathLike[str], state: Any) -> None:
    """Write tensors and plain values to a torch file of mode 0600, atomically; an older file is replaced.

    Raises:
        GramianError: if the file cannot be written.
    """
    path = Path(path)
    with _refused_in_one_line(path), replacing(path, private=True) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load_private(path: str | os.PathLike[str]) -> Any:
    """Read a file of `save_private` into host memory, without running code from it; warns if other users can read the file.

    Raises:
        GramianError: if the file is missing or cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as reason:
        raise GramianError(f"{path}: {reason.strerror}; expected a file written by save_private") from None
    except Exception as reason:  # a damaged file may raise anything
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        raise GramianError(f"{path}: not readable ({first}); expected a file written by save_private") from None
    if mode & 0o077:
        warnings.warn(f"{path}: mode {mode:04o} lets others read the secret key; expected 0600", stacklevel=2)
    return state


def _read_mark(path: Path) -> tuple[int, Any]:
    """Number of releases begun in a counter file, −1 if there is no file; and the accounting state in it.

    A damaged file raises a `GramianError`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return -1, None
    except (OSError, UnicodeDecodeError) as reason:
        raise GramianError(f"{path}: not readable ({reason}); expected a release counter") from None
    try:
        content = json.loads(text)
        mark, about = content["begun"], content.get("about")
    except (ValueError, KeyError, TypeError):
        mark, about = None, None
    if not is_count(mark):
        raise GramianError(f'{path}: damaged; expected {{"begun": number}}, the releases begun so far')
    return mark, about


def _write_mark(path: Path, mark: int, about: Any = None) -> None:
    with _refused_in_one_line(path):
        replace_file(path, json.dumps({"format": FORMAT, "begun": mark, "about": about}).encode(), private=True)


@contextlib.contextmanager
def _refused_in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise GramianError(f"{path}: {reason.strerror}; expected a folder that can be written") from None
