"""A corpus of several GB: tokenised by all cores, interrupted, started again, trained on two processes inside 2 GB.

The corpus is made of the text files of a folder (Debian's package linux-doc-6.1, unpacked, is a good one), repeated under keyed
edits until it is large enough, as JSON lines. Measured: seconds of tokenising with a SIGKILL of everything in its middle, the
largest sum of RssAnon over all processes, seconds from a second start to its first step, and whether a run that is killed while
it trains ends in the weights of one that was not. Linux only.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._timing import write

STEPS = 40
WORD = re.compile(r"[A-Za-z]{4,}")


def edited(text: str, key: int) -> str:
    """The text with about one word in thirty replaced, which ones and by what decided by the key."""
    drawn = random.Random(key)
    return WORD.sub(lambda m: m[0] if drawn.random() > 0.03 else f"{m[0][::-1]}{drawn.randrange(1000)}", text)


def make_corpus(folder: Path, source: Path, size: int) -> tuple[int, int]:
    """Write JSON lines of about 100 MB each until they have `size` bytes; returns bytes and documents."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(
        path for path in source.rglob("*") if path.suffix in (".txt", ".rst", ".html", ".md", ".py") and path.is_file()
    )
    texts = [text for path in files if len(text := path.read_text(errors="replace")) > 500]
    written, documents, number = 0, 0, 0
    copies = (
        edited(text, key * len(texts) + place) if key else text
        for key in range(10**6)
        for place, text in enumerate(texts)
    )
    while written < size:
        with (folder / f"{number:04d}.jsonl").open("w", encoding="utf-8") as file:
            here = 0
            while here < 100_000_000 and written + here < size:
                line = json.dumps({"text": next(copies)}, ensure_ascii=False) + "\n"
                here += len(line.encode())
                documents += 1
                file.write(line)
        written += here
        number += 1
    return written, documents


def anonymous_bytes(root: int) -> int:
    """RssAnon of a process and all below it."""
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+)", status)
            total += int(found[1]) * 1024 if found else 0
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


class Run:
    """`gramian train` on two processes, watched."""

    def __init__(self, folder: Path, config: Path, *overrides: str) -> None:
        self.most, self.folder = 0, folder
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "-m",
            "gramian",
            "train",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, str(config), f"run.folder={folder}", *overrides],
            env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines += self.process.stdout

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.most = max(self.most, anonymous_bytes(self.process.pid))
            time.sleep(0.2)

    def until(self, reached: Any, what: str, limit: float = 7200) -> float:
        """Wait until `reached()`; returns the seconds since the start."""
        while not reached():
            if self.process.poll() not in (None, 0) or time.perf_counter() - self.begun > limit:
                raise RuntimeError(f"{what}: not reached\n" + "".join(self._lines[-20:]))
            time.sleep(0.05)
        return time.perf_counter() - self.begun

    def kill(self) -> None:
        """SIGKILL to all processes of the run."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def steps(self) -> int:
        """The last step in its metrics."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0


def weights(folder: Path) -> str:
    """SHA-256 of the weights of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    digest = hashlib.sha256()
    for path in sorted(newest.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return f"{newest.name}:{digest.hexdigest()[:16]}"


def config_of(folder: Path, tokenizer: str) -> Path:
    """The config of the runs."""
    path = folder / "run.toml"
    path.write_text(
        f'[run]\nsteps = {STEPS}\ndevice = "cpu"\nlog_every = 1\nreport = false\n[model]\nlayers = 2\nwidth = 64\nheads = 2\n'
        f'[data]\nsource = "jsonl"\nfiles = ["{folder}/corpus/*.jsonl"]\ncache = "{folder}/tokens"\ntokenizer = "{tokenizer}"\n'
        "length = 128\nbatch = 16\nworkers = 1\n[schedule]\nwarmup = 5\n[checkpoint]\nevery = 10\nsnapshot_every = 10\n"
        "[eval]\nevery = 20\nwindows = 32\n"
    )
    return path


def pieces(folder: Path) -> int:
    """Number of pieces whose tokens are written."""
    return len([*(folder / "tokens").glob("*/[0-9]*.json")])


@contextlib.contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Whatever happens, nothing of the run stays."""
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.kill()


def main() -> None:
    """Make the corpus if it is not there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where corpus, tokens and runs lie; some 4 × gigabytes"
    )
    parser.add_argument("--text", type=Path, required=True, help="folder of text files")
    parser.add_argument("--gigabytes", type=float, default=5.2)
    parser.add_argument("--tokenizer", default="bytes", help='"bytes", or the folder of a Hugging Face tokenizer')
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    begun = time.perf_counter()
    size, documents = make_corpus(folder / "corpus", options.text, int(options.gigabytes * 1e9))
    print(f"corpus: {size / 1e9:.2f} GB, {documents:,} documents, {time.perf_counter() - begun:.0f} s", flush=True)
    config, found = (
        config_of(folder, options.tokenizer),
        {"bytes": size, "documents": documents, "tokenizer": Path(options.tokenizer).name},
    )
    most = 0
    with ended(Run(folder / "first", config)) as run:
        found["seconds_to_third_piece"] = run.until(lambda: pieces(folder) >= 3, "tokenising")
        run.kill()
        found["pieces_at_kill"], most = pieces(folder), run.most
    with ended(Run(folder / "first", config)) as run:
        manifest = folder / "tokens"
        found["seconds_of_the_rest"] = run.until(lambda: [*manifest.glob("*/manifest.json")], "the tokens")
        found["first_start_to_first_step"] = run.until(lambda: run.steps() >= 1, "the first step")
        run.until(lambda: run.process.poll() == 0, "the end")
        most = max(most, run.most)
    found["windows"] = json.loads((folder / "first" / "record.json").read_text())["windows"]
    with ended(Run(folder / "second", config)) as run:
        found["second_start_to_first_step"] = run.until(lambda: run.steps() >= 1, "the first step")
        run.until(lambda: run.steps() >= 25, "step 25")
        run.kill()
        most = max(most, run.most)
    with ended(Run(folder / "second", config)) as run:
        run.until(lambda: run.process.poll() == 0, "the end")
        most = max(most, run.most)
    found |= {"most_RssAnon_GB": most / 1e9, "weights": [weights(folder / "first"), weights(folder / "second")]}
    found["equal"] = found["weights"][0] == found["weights"][1]
    print(json.dumps(found, indent=1))
    print(write("large_corpus", found))


if __name__ == "__main__":
    main()
