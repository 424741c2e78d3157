"""The folder of a run, which one run at a time may use, for one config.

It has `config.toml` (resolved), `record.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/` and `.lock`.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from gramian.core.durable_files import replace_text
from gramian.core.errors import GramianError
from gramian.core.folder_lock import LOCK, FolderLock
from gramian.train.config.config import RUN_ONLY, Config, load_config


class RunFolder:
    """The folder of a run, locked inside a `with` block; nothing is created before.

    Example:
        >>> with RunFolder(config) as folder:  # doctest: +SKIP
        ...     Trainer(build(config, grid), folder).run()
    """

    def __init__(self, config: Config) -> None:
        self.config, self.path = config, Path(config.run.folder)
        self._lock: FolderLock | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        """Lock the run folder and write the config into it.

        Raises `GramianError` if it is in use, has a run of another config, or cannot be written; nothing is overwritten.
        """
        try:
            paths = (self.path / "config.toml", self.path / LOCK, self.path, *self.path.parents)
            self._created = [path for path in paths if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
        except BlockingIOError:
            raise GramianError(
                f"run.folder: {self.path} is in use by another run; expected another folder, or that one to end"
            ) from None
        except OSError as problem:
            raise GramianError(
                f"run.folder: {self.path} cannot be written ({problem.strerror}); expected a folder"
            ) from None
        try:
            self._check()
        except GramianError:
            self.discard()
            raise
        replace_text(self.path / "config.toml", self.config.toml())
        return self

    def __exit__(self, *error: object) -> None:
        """Unlock the run folder."""
        self._leave()

    def discard(self) -> None:
        """Remove what locking the run folder created, and unlock it; for a run that was refused before it began."""
        for path in self._created:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        self._leave()

    def _leave(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check(self) -> None:
        path = self.path / "config.toml"
        if not path.exists():
            if self.begun:
                raise GramianError(f"run.folder: {self.path} holds a run without its config; expected another folder")
            return
        try:
            before = load_config(path)
        except GramianError as problem:
            raise GramianError(
                f"run.folder: {path} is not a config of this version ({problem}); expected another folder"
            ) from None
        if not self.begun:
            if path.read_text(encoding="utf-8") != before.toml():  # written by hand, perhaps with comments
                raise GramianError(f"run.folder: {path} was not written by a run; expected another folder")
        elif before.hash != self.config.hash:
            raise GramianError(
                f"run.folder: {self.path} holds a run of another config ({difference(before, self.config)}); "
                "expected another folder, or the same config"
            )

    @property
    def begun(self) -> bool:
        """Whether the run folder has checkpoints or metrics, which must not be overwritten."""
        metrics = self.path / "metrics.jsonl"
        return any(self.path.glob("checkpoints/*")) or (metrics.exists() and metrics.stat().st_size > 0)

    @property
    def checkpoints(self) -> Path:
        """Path of the run's folder of checkpoints."""
        return self.path / "checkpoints"


def difference(before: Config, now: Config) -> str:
    """Text with the first config key that differs between two configs and changes results, and both values."""
    old, new = asdict(before), asdict(now)
    for section in old:
        one, other = old[section] or {}, new[section] or {}
        if (old[section] is None) != (new[section] is None):
            return f"[{section}] is {'not in it' if old[section] is None else 'in it'}"
        for key in one:
            if (section, key) not in RUN_ONLY and one[key] != other[key]:
                return f"{section}.{key} is {one[key]!r} there, {other[key]!r} here"
    return "nothing"


class JsonLines:
    """A file of JSON lines that is appended to; lines that a full disk refuses are written together with later ones.

    With `upto`, lines whose "attempt" (number of the tried optimizer step) is larger and incomplete lines are removed at first,
    because a resumed run writes them again; None: all lines stay. With `private` the file has mode 0600. Raises a GramianError
    if the file cannot be opened.
    """

    def __init__(self, path: Path, upto: int | None = None, *, private: bool = False) -> None:
        try:
            if upto is not None and path.exists():
                lines = [line for line in read_lines(path) if _attempt(line) <= upto]
                replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600 if private else 0o644)
            if private:
                os.fchmod(self._file, 0o600)
        except OSError as problem:
            raise GramianError(f"{path}: cannot be written ({problem.strerror}); expected a file that can") from None
        size = os.fstat(self._file).st_size
        self._lock = threading.Lock()
        self._waiting = b"\n" if size and os.pread(self._file, 1, size - 1) != b"\n" else b""
        """Bytes that are not written yet; at first a newline, if a killed process left an incomplete line."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Append `line` as JSON; if the disk is full, it is written with a later line."""
        text = json.dumps(_as_json(line), allow_nan=False).encode() + b"\n"
        with self._lock:  # of the loop and of the thread that writes checkpoints
            self._waiting += text
            with contextlib.suppress(OSError):
                while self._waiting:
                    self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def close(self) -> None:
        """Close the file of JSON lines."""
        os.close(self._file)


def _attempt(line: Mapping[str, Any]) -> int:
    attempt = line.get("attempt", 0)
    return attempt if isinstance(attempt, int) else 0


def _as_json(value: Any) -> Any:
    """`value` with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, list | tuple) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of JSON objects, parsed; an empty list if the file does not exist."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            parsed = json.loads(line)
        except ValueError:
            continue  # the process ended in the middle of it
        if isinstance(parsed, dict):
            found.append(parsed)
    return found
