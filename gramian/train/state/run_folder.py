"""The folder of a run: one process group at a time, one config, files that are whole or not there.

`config.toml` (resolved), `record.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, and `.lock` while somebody is in it.
"""

import contextlib
import fcntl
import json
import math
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gramian.core.errors import GramianError
from gramian.train.config.config import RUN_ONLY, Config, load_config


class RunFolder:
    """A run folder, taken for as long as the context lasts."""

    def __init__(self, config: Config) -> None:
        """Nothing is created yet."""
        self.config, self.path = config, Path(config.run.folder)
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Take the folder, and write the config into it.

        Raises:
            GramianError: if it is in use, holds a run of another config, or cannot be written; nothing is overwritten.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as problem:
            raise GramianError(
                f"run.folder: {self.path} cannot be written ({problem.strerror}); expected a folder"
            ) from None
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(mine()))  # data workers outlive a killed run for some seconds
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._leave()
            raise GramianError(
                f"run.folder: {self.path} is in use by another run; expected another folder, or that one to end"
            ) from None
        try:
            self._check()
        except GramianError:
            self._leave()
            raise
        write_whole(self.path / "config.toml", self.config.toml())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the folder to others."""
        self._leave()

    def _leave(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self) -> None:
        path = self.path / "config.toml"
        if not path.exists():
            if self._begun():
                raise GramianError(f"run.folder: {self.path} holds a run without its config; expected another folder")
            return
        try:
            before = load_config(path)
        except GramianError as problem:
            raise GramianError(
                f"run.folder: {path} is no config of this version ({problem}); expected another folder"
            ) from None
        if not self._begun():
            if path.read_text(encoding="utf-8") != before.toml():  # somebody's own, with comments perhaps
                raise GramianError(f"run.folder: {path} was not written by a run; expected another folder")
        elif before.hash != self.config.hash:
            raise GramianError(
                f"run.folder: {self.path} holds a run of another config ({difference(before, self.config)}); "
                "expected another folder, or the same config"
            )

    def _begun(self) -> bool:
        """True if there is anything that a run would not like to lose."""
        metrics = self.path / "metrics.jsonl"
        return any(self.path.glob("checkpoints/*")) or (metrics.exists() and metrics.stat().st_size > 0)

    @property
    def checkpoints(self) -> Path:
        """Where the state is written."""
        return self.path / "checkpoints"


def _leave(folder: RunFolder | None) -> None:
    if folder is not None:
        folder._leave()


def difference(before: Config, now: Config) -> str:
    """The first key that differs and decides something, with both values."""
    old, new = asdict(before), asdict(now)
    for section in old:
        one, other = old[section] or {}, new[section] or {}
        if (old[section] is None) != (new[section] is None):
            return f"[{section}] is {'not in it' if old[section] is None else 'in it'}"
        for key in one:
            if (section, key) not in RUN_ONLY and one[key] != other[key]:
                return f"{section}.{key} is {one[key]!r} there, {other[key]!r} here"
    return "nothing"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or as it was before.

    Raises:
        GramianError: if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise GramianError(f"{path}: cannot be written ({problem.strerror}); expected a folder that can") from None


class Lines:
    """A file of JSON lines that is appended to; what a full disk refuses is written as soon as it can be."""

    def __init__(self, path: Path, upto: int | None = None, *, private: bool = False) -> None:
        """Open it.

        Args:
            path: of the file.
            upto: lines of later attempts, and half lines, are cut off: a resumed run writes them again. None: keep all.
            private: True for a file that its owner alone can read.

        Raises:
            GramianError: if it cannot be read or written.
        """
        try:
            if upto is not None and path.exists():
                kept = [line for line in read_lines(path) if _attempt(line) <= upto]
                write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600 if private else 0o644)
            if private:
                os.fchmod(self._file, 0o600)
        except OSError as problem:
            raise GramianError(f"{path}: cannot be written ({problem.strerror}); expected a file that can") from None
        size = os.fstat(self._file).st_size
        self._lock = threading.Lock()
        self._waiting = b"\n" if size and os.pread(self._file, 1, size - 1) != b"\n" else b""
        """Of lines that are not written yet; begins with the end of a line that a killed process left half."""

    def write(self, line: Mapping[str, Any]) -> None:
        """One line, at once if the disk takes it."""
        text = json.dumps(_as_json(line), allow_nan=False).encode() + b"\n"
        with self._lock:  # of the loop and of the thread that writes checkpoints
            self._waiting += text
            with contextlib.suppress(OSError):
                while self._waiting:
                    self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def close(self) -> None:
        """No more lines."""
        os.close(self._file)


def _attempt(line: Mapping[str, Any]) -> int:
    told = line.get("attempt", 0)
    return told if isinstance(told, int) else 0


def _as_json(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, list | tuple) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of JSON lines, which are objects; none if it is not there."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            told = json.loads(line)
        except ValueError:
            continue  # the process ended in the middle of it
        if isinstance(told, dict):
            found.append(told)
    return found
