"""Compare killed and resumed runs with an uninterrupted one, bit for bit: parameters, optimizer, metrics.

One run trains to the end. Others of the same config are killed (SIGKILL, all processes) at a step or inside a save, and started
again. A run is `python -m gramian train` in processes forked from a server that has the library loaded, so that a start
costs little.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch

from gramian.core.errors import GramianError
from gramian.train.config.config import Config
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.run_folder import read_lines

PRELOADED = (
    "torch._inductor",
    "gramian.cli.train",
    "gramian.train.loop.trainer",
    "gramian.train.build.run_parts",
    "gramian.train.state.run_record",
)
POLL_SECONDS = 0.001
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Kill:
    """The moment at which a run is killed: at a step, or during a save that follows a step, after a delay."""

    at: str
    """When to kill: "step" as soon as the step's line is in metrics.jsonl, "save" as soon as a later save is under way."""
    step: int
    delay: float = 0.0
    """Seconds to wait after the moment that `at` and `step` name."""

    def __str__(self) -> str:
        moment = "step" if self.at == "step" else "a save from step"
        return f"killed at {moment} {self.step} + {self.delay * 1e3:.0f} ms"


def shortened(config: Config, fsdp: bool = False) -> Config:
    """Shorten a config to a run of seconds that saves often; model, data, optimizer and precision stay."""
    steps = min(config.run.steps, 40)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, steps=steps, log_every=1, tensorboard=False, wandb=False),
        schedule=dataclasses.replace(config.schedule, warmup=min(config.schedule.warmup, steps // 4)),
        eval=dataclasses.replace(config.eval, every=max(1, steps // 2), windows=min(config.eval.windows, 8)),
        checkpoint=dataclasses.replace(config.checkpoint, snapshot_every=max(1, steps // 4), every=max(1, steps // 4)),
        parallel=dataclasses.replace(config.parallel, strategy="fsdp2") if fsdp else config.parallel,
    )


def random_kills(steps: int, count: int, seed: int) -> list[Kill]:
    """Draw `count` moments over a run of `steps` steps at which it is killed, every third inside a save."""
    draw = random.Random(seed)
    return [
        Kill("save" if i % 3 == 2 else "step", draw.randrange(max(1, steps - 1)), draw.random() * 0.02)
        for i in range(count)
    ]


def train(config: Config, folder: Path, processes: int = 1, kill: Kill | None = None) -> bool:
    """Run `gramian train` into a folder, in new processes, which are started as torchrun would if there are several.

    Returns True if the run reached its end, False if all processes were killed before, at the moment of `kill`; None: no kill.

    Raises:
        GramianError: if the run ended by itself with an exit code other than 0, or took longer than `TIMEOUT_SECONDS`.
    """
    path = folder.with_name(f"{folder.name}.toml")
    path.write_text(config.toml(), encoding="utf-8")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    port = _free_port() if processes > 1 else 0
    argv = ["train", str(path), f"run.folder={folder}", "run.log_every=1"]
    log = folder.with_name(f"{folder.name}.log")
    workers = [
        context.Process(target=_child, args=(argv, rank, processes, port, str(log))) for rank in range(processes)
    ]
    _start_server()
    try:
        for worker in workers:
            worker.start()
        killed = _wait(workers, folder, kill)
    finally:
        _kill([worker for worker in workers if worker.pid is not None])
    if killed:
        return False
    if any(worker.exitcode for worker in workers):
        lines = log.read_text(encoding="utf-8").strip().splitlines() if log.exists() else []
        raise GramianError(
            f"{folder}: the run ended with {workers[0].exitcode} ({lines[-1] if lines else 'no output'})"
        )
    return True


def differences(expected: Path, found: Path) -> list[str]:
    """List what differs between two run folders: tensors and facts (JSON values) of the newest checkpoint, and metrics.

    Empty if nothing does; measured times are not compared.
    """
    one, other = (CheckpointStore(folder / "checkpoints", 1).newest() for folder in (expected, found))
    if one is None or other is None:
        return ["checkpoints: one of the runs has none"]
    listed = []
    tensors, other_tensors = one.tensors(), other.tensors()
    if tensors.keys() != other_tensors.keys():
        listed.append(f"tensors: {sorted(tensors.keys() ^ other_tensors.keys())[0]} is in one of them only")
    common = tensors.keys() & other_tensors.keys()
    listed += [f"{name}: differs" for name in common if not _same_bits(tensors[name], other_tensors[name])]
    facts, other_facts = _timeless(one.facts), _timeless(other.facts)
    listed += [f"{key}: differs" for key in facts.keys() | other_facts.keys() if facts.get(key) != other_facts.get(key)]
    lines, other_lines = (
        [_without_time(line) for line in read_lines(folder / "metrics.jsonl")] for folder in (expected, found)
    )
    if lines != other_lines:
        place = next(
            (i for i, (a, b) in enumerate(zip(lines, other_lines, strict=False)) if a != b),
            min(len(lines), len(other_lines)),
        )
        listed.append(f"metrics.jsonl: line {place + 1} of {len(lines)} differs ({len(other_lines)} there)")
    return listed


def check_resume(
    config: Config,
    folder: Path,
    kills: Sequence[Kill],
    processes: int = 1,
    on_progress: Callable[[int, str], None] = lambda done, name: None,
) -> dict[str, list[str]]:
    """Train once without a kill and once with each of `kills`, resumed: {kill: differences from the run without a kill}.

    The runs are in folders below `folder`; `on_progress` is called with the number of finished runs and the name of the next.
    """
    on_progress(0, "not killed")
    train(config, folder / "whole", processes)
    found = {}
    for i, kill in enumerate(kills):
        on_progress(i + 1, str(kill))
        own = folder / f"killed-{i}"
        if not train(config, own, processes, kill):
            train(config, own, processes)
        found[f"{i + 1}: {kill}"] = differences(folder / "whole", own)
    return found


def _start_server() -> None:
    """Start the server that forks the runs; both ignore a terminal's Ctrl-C, upon which this process kills the runs."""
    if threading.current_thread() is not threading.main_thread():
        return ensure_running()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(workers: Sequence[Any], folder: Path, kill: Kill | None) -> bool:
    """Wait until all processes of a run have ended, or one failed; True if they were killed here, at the moment of `kill`."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(worker.is_alive() for worker in workers):
        if time.monotonic() > deadline:
            raise GramianError(f"{folder}: the run took more than {TIMEOUT_SECONDS:.0f} s; expected a shorter one")
        if any(worker.exitcode not in (None, 0) for worker in workers):
            return False  # the caller ends the rest
        if kill is not None and _reached(folder, kill):
            time.sleep(kill.delay)
            _kill(workers)
            return any(worker.exitcode == -signal.SIGKILL for worker in workers)
        time.sleep(POLL_SECONDS)
    return False


def _kill(workers: Sequence[Any]) -> None:
    """Kill the processes of a run that are alive, and join all."""
    for worker in workers:
        if worker.is_alive() and worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.join()


def _reached(folder: Path, kill: Kill) -> bool:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        lines = 0
    return lines >= kill.step and (kill.at == "step" or any(folder.glob("checkpoints/.tmp-*")))


def _child(argv: list[str], rank: int, processes: int, port: int, log: str) -> None:
    """Run `python -m gramian` in this forked process, with its output in a file."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # data workers of a server's own would outlive a killed run
    if processes > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {name: str(value) for name, value in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["gramian", *argv]
    with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            runpy.run_module("gramian", run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    os._exit(status)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _timeless(facts: Any) -> Any:
    """A copy of a checkpoint's facts without measured seconds and the random name of a private account."""
    if isinstance(facts, dict):
        return {key: _timeless(value) for key, value in facts.items() if key not in ("seconds", "account")}
    return [_timeless(value) for value in facts] if isinstance(facts, list) else facts


def _without_time(line: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in line.items() if key != "time"}, sort_keys=True)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port
