"""Write a token store with a process on each core; what an earlier build wrote stays, and one build runs at a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gramian.core.durable_files import TEMPORARY, replace_file
from gramian.core.errors import GramianError
from gramian.core.folder_lock import FolderLock
from gramian.data.corpus.record_encoder import RecordEncoder
from gramian.data.token_store.open_store import MANIFEST
from gramian.data.token_store.piece_files import name_of, read_record
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.token_store.tokenize_worker import PLAN, tokenize_piece

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are tokenised, and those of all files."""
ALONE = 1 << 26
"""Size in bytes up to which one process tokenises alone, because starting more takes longer than it saves."""
TURN = 0.5
"""Seconds between two attempts to take a store that another process writes."""


def no_progress(done: int, size: int) -> None:
    """A `Progress` that shows nothing."""


def build_store(
    folder: Path,
    plan: StorePlan,
    encoder: RecordEncoder,
    progress: Progress = no_progress,
    processes: int | None = None,
) -> None:
    """Write the missing pieces of a store, and its manifest. If another process writes it, wait for that one.

    Args:
        folder: the store's folder; it is made.
        plan: what the store is made from.
        encoder: the plan's tokenizer, for pieces that this process tokenises.
        progress: called after each piece.
        processes: how many tokenise; None: one for each core that this process may use.

    Raises:
        GramianError: one line that names the file and what is wrong with it, or the folder that cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _taken(folder) as mine:
            if not mine:
                return
            for left_behind in folder.glob(f"{TEMPORARY}[0-9mp]*.*"):
                left_behind.unlink()
            replace_file(folder / PLAN, json.dumps(plan.to_json()).encode())
            missing = [piece for piece in range(len(plan.pieces)) if read_record(folder, piece) is None]
            sizes = [sum(span.size for span in piece) for piece in plan.pieces]
            size, left = sum(sizes), sum(sizes[piece] for piece in missing)
            count = 1 if processes is None and left <= ALONE else processes or len(os.sched_getaffinity(0))
            progress(size - left, size)
            for piece in _tokenized(folder, plan, encoder, missing, min(len(missing), count)):
                left -= sizes[piece]
                progress(size - left, size)
            plan.require_unchanged()
            records = [json.loads((folder / name_of(piece, "json")).read_bytes()) for piece in range(len(plan.pieces))]
            body = {"plan": plan.to_json(), "records": records}
            replace_file(folder / MANIFEST, json.dumps(body).encode())
    except OSError as problem:
        raise GramianError(
            f"data.cache: {folder} cannot be written ({problem.strerror}); expected a folder with room for the tokens"
        ) from None


@contextmanager
def _taken(folder: Path) -> Iterator[bool]:
    """Context manager: no other process writes the store; False if there is nothing to write, because it is complete."""
    lock = None
    while lock is None and not (folder / MANIFEST).exists():
        try:
            lock = FolderLock(folder)
        except BlockingIOError:
            time.sleep(TURN)
    try:
        yield lock is not None and not (folder / MANIFEST).exists()
    finally:
        if lock is not None:
            lock.release()


def _tokenized(
    folder: Path, plan: StorePlan, encoder: RecordEncoder, pieces: Sequence[int], count: int
) -> Iterator[int]:
    """Yield each piece when it is written."""
    if count <= 1:
        for piece in pieces:
            tokenize_piece(folder, plan, piece, encoder)
            yield piece
        return
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    command = [sys.executable, "-m", "gramian.data.token_store.tokenize_worker", str(folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    workers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process
        )
        for _ in range(count)
    ]
    for worker in workers:
        idle.put(worker)
    pool = ThreadPoolExecutor(count)
    try:
        futures = {pool.submit(_serve, idle, piece): piece for piece in pieces}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
            worker.communicate()


def _serve(idle: "SimpleQueue[subprocess.Popen[str]]", piece: int) -> None:
    worker = idle.get()
    line: Any = ""
    try:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(f"{piece}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:  # it has ended
        line = ""
    finally:
        idle.put(worker)
    if not line:
        code = worker.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        raise GramianError(
            f"data.cache: a process that tokenises died ({how}); what it said stands above; "
            "expected enough memory for one on each core"
        )
    problem = json.loads(line)
    if problem is not None:
        raise GramianError(problem)
