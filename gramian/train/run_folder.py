"""The folder of a run: one process group at a time, one config, files that are whole or not there.

`config.toml` (resolved), `record.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, and `.lock` while somebody is in it.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gramian.errors import GramianError
from gramian.train.config import RUN_ONLY, Config, load_config


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
        before = load_config(path)
        if before.hash != self.config.hash and self._begun():
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
    """Write a file so that it is there whole, or as it was before."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Lines:
    """A file of JSON lines that is appended to."""

    def __init__(self, path: Path, upto: int | None = None) -> None:
        """Open it.

        Args:
            path: of the file.
            upto: lines of later attempts, and half lines, are cut off: a resumed run writes them again. None: keep all.
        """
        if upto is not None and path.exists():
            kept = [line for line in read_lines(path) if line.get("attempt", 0) <= upto]
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        """One line, at once."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of JSON lines; none if it is not there."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the process ended in the middle of it
    return found
