"""Run a fuzzed case in this process through the command line's `main`, and say what came of it.

``python -m tests.cli.fuzz_judge 17 18`` runs two cases and prints them; ``17 --count 1000`` runs a thousand from 17 on and
prints those that are wrong.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from unittest.mock import patch

import numpy as np
import tomli_w
import torch

from gramian.cli import main
from tests.cli.fuzzed import CONFIG, TINY, Case, case
from tests.kit.waiting import PATIENCE

SOON, MEMORY = 1.0, 2 << 30
"""Seconds after which Ctrl-C ends a long case; bytes that a case may allocate."""
RAW = re.compile(r"\b(KeyError|AttributeError|TypeError|IndexError|AssertionError|ValueError|UnicodeDecodeError)\b")
"""What no line for a user has."""


class Hang(BaseException):
    """A case that did not end."""


class Ended(BaseException):
    """A case that a second Ctrl-C would have ended at once."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case; `fault` is empty if it ended as it should."""

    case: Case
    status: int | None
    line: str
    fault: str = ""

    @property
    def kind(self) -> str:
        return self.fault.partition(":")[0] or {0: "ok", 1: "failed", 2: "refused"}.get(self.status or 0, "long")

    def __str__(self) -> str:
        return f"{self.fault or self.kind}\n{self.case}\n  {self.status}: {self.line}"


@functools.cache
def world() -> Path:
    """A folder of files that cases read: texts, a finished run, and some of each wrong kind."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz")) / "w"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    book = "".join(f"line {number} of a book\n" for number in range(200))
    (folder / "texts").mkdir(parents=True)
    for path in (folder / "book.txt", folder / "texts" / "one.txt"):
        path.write_text(book)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in book.splitlines()))
    places = np.arange(1, 2001)
    np.save(folder / "ids.npy", np.where(places % 250, 1 + places * places % 249, 0).astype(np.uint16))
    (folder / "ids.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": 256, "end": 0}))
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "latin.txt").write_bytes("füße\n".encode("latin-1") * 99)
    (folder / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00junk")
    (folder / "odd.jsonl").write_text('{"text": 1}\n[]\n')
    (folder / "half.json").write_text('{"a": ')
    (folder / "loop").symlink_to("loop")
    (folder.parent / CONFIG).write_text(tomli_w.dumps(TINY))
    cache = ["teacher.path=w/run", "teacher.source=hidden", "teacher.cache=w/cache"]
    with _inside(folder.parent) as errors:
        for argv in (["train", CONFIG, "run.folder=w/run"], ["cache", CONFIG, *cache]):
            if main(argv) != 0:
                raise RuntimeError(errors())
    for name, whole in (("cut", "run"), ("cutcache", "cache")):
        shutil.copytree(folder / whole, folder / name)
        for path in (folder / name).rglob("*.*"):
            if path.suffix not in (".json", ".toml"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "bare").mkdir()
    shutil.copy(folder / "run" / "config.toml", folder / "bare")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.toml").write_text("[other]\n")
    (folder / "foreign" / "config.json").write_text("[]")
    return folder


def _add_model(folder: Path) -> None:
    """A Hugging Face model, unless it is there."""
    if not (world() / "hf").exists():
        from tests.train.test_examples import save_model

        with contextlib.redirect_stderr(io.StringIO()):
            save_model(world() / "hf")
    shutil.copytree(world() / "hf", folder, dirs_exist_ok=True)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[Callable[[], str]]:
    """Standard output and error as a process has them, in a folder; torch's settings as before."""
    before = Path.cwd(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch.dict(os.environ, COLUMNS="80"):
            yield lambda: _content(err)
    finally:
        os.chdir(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.set_float32_matmul_precision(before[2])


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


@contextlib.contextmanager
def _limited(long: bool) -> Iterator[None]:
    """Little memory; Ctrl-C soon in a long run, and `Hang` after `PATIENCE` seconds in any."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    state = {"rings": 0}

    def ring(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, SOON if long else PATIENCE)
        state["rings"] += 1
        if long and state["rings"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            raise Ended  # a step that takes forever: a second Ctrl-C would end the process
        elif not long or state["rings"] * SOON > PATIENCE:
            raise Hang

    handlers = signal.signal(signal.SIGALRM, ring), signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SOON if long else PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handlers[0])
        signal.signal(signal.SIGINT, handlers[1])


def listing(folder: Path) -> set[tuple[str, int]]:
    """Names and times of change of all files below a folder."""
    found = {(str(path.relative_to(folder)), path.lstat()) for path in folder.rglob("*")}
    return {(name, stat.st_mtime_ns if S_ISREG(stat.st_mode) else 0) for name, stat in found}


@functools.cache
def _desk() -> Path:
    """The folder in which cases run, with a copy of the `world`."""
    folder = Path(tempfile.mkdtemp(prefix="desk"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(world(), folder / "w", symlinks=True)
    return folder


def judge(one: Case) -> Outcome:
    """Run a case in a folder with a copy of the `world`; nothing of it is left there."""
    folder = _desk()
    if b"w/hf" in (one.config or b"") or "w/hf" in one.argv:
        _add_model(folder / "w" / "hf")
    if one.config is not None:
        (folder / CONFIG).write_bytes(one.config)
    before = listing(folder)
    torch.set_grad_enabled(True)  # an exception in the middle of `no_grad` leaves it off; a process would have ended
    with _inside(folder) as errors, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status, crash = _status(one)
    text = errors()
    changed = sorted({path for path, _ in listing(folder) ^ before})
    for path in folder.iterdir():
        if path.name != "w":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if any(path.startswith("w/") for path in changed):
        shutil.rmtree(folder / "w")
        shutil.copytree(world(), folder / "w", symlinks=True)
    return Outcome(one, status, text.strip(), crash or _fault(one, status, text, changed))


def _status(one: Case) -> tuple[int | None, str]:
    try:
        with _limited(one.long), patch("gramian.analysis.plots.available", lambda: False):
            return main(list(one.argv)), ""
    except Ended:
        return 130, "" if one.long else "hang: in a step"
    except Hang:
        return None, f"hang: {traceback.format_exc(limit=-6)}"
    except BaseException as problem:
        return None, f"traceback: {type(problem).__name__}: {str(problem)[:200]}\n{traceback.format_exc(limit=-6)}"


def _fault(one: Case, status: int | None, text: str, changed: list[str]) -> str:
    """What is wrong with an end; empty if nothing is."""
    if status in (0, 130):
        printed = "Traceback" in text and not one.long  # Ctrl-C in a destructor: `gramian.__main__` has a hook for it
        replaced = "--cpu" in one.argv and "run.device" in one.names  # the flag sets the key before it is read
        refused = one.refused and not replaced
        return "accepted: must be refused" if refused else ("traceback: printed" if printed else "")
    line = text.strip()
    if text.count("\n") != 1 or not line.startswith("gramian: "):
        return f"lines: {text.count(chr(10))}"
    if len(line) > 1000:
        return f"lines: {len(line)} characters"
    if not line.isprintable():
        return "lines: control characters"
    if RAW.search(line):
        return "raw: text of an exception"
    if status == 2 and one.kind == "valid":
        return "refused: must be accepted"
    if status == 1:
        return "code: 1 for what must be refused" if one.refused else ""
    if "expected" not in line and "did you mean" not in line:
        return "unclear: nothing is expected"
    if one.names and not any(name in line for name in one.names):
        return f"field: {one.names} not named"
    return f"changed: {changed[:5]}" if changed else ""


def tally(found: list[Outcome]) -> str:
    """Counts of the outcomes, on one line."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(one.kind for one in found).most_common())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--count" in arguments:
        first, count = int(arguments[0]), int(arguments[2])
        outcomes = [judge(case(seed)) for seed in range(first, first + count)]
        print(*(one for one in outcomes if one.fault), tally(outcomes), sep="\n\n")
    else:
        print(*(judge(case(int(seed))) for seed in arguments), sep="\n\n")
