"""Run the body of a test on several gloo processes that are started once.

Usage::

    @distributed(world_size=2)
    @pytest.mark.parametrize("size", [3, 5])
    def test_sum(rank, size):
        x = torch.full((size,), float(rank))
        dist.all_reduce(x)
        assert x.eq(1).all()

The first test of a world size starts its pool; later ones reuse it, each beginning with the same seed and with the
default process group in place. A body gives back what it took: groups it makes, globals it sets. Arguments and results
travel by pickle. A failure of any rank ends the pool, since the ranks may then disagree about which collective comes
next.
"""

import atexit
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kit import proofs
from tests.kit.seeds import seeded
from tests.kit.waiting import PATIENCE

# After one rank has failed, how long the others may take to say that they failed too.
GRACE_AFTER_FAILURE = 20.0
# What takes long to import, once, in the process that all pools are forked from, and runs of gramian.verify.resume.
PRELOADED = [
    "torch.distributed.fsdp", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor",
    "transformers.models.llama.modeling_llama", "tests.dist.worlds", "gramian.cli.train",
    "gramian.train.build.run_parts", "gramian.train.state.run_record", "gramian.train.loop.trainer",
    "opacus.accountants",
]  # fmt: skip

_pools: dict[int, "_Pool"] = {}


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message holds what each of them had to say."""


def distributed(world_size: int, timeout: float = PATIENCE) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a module-level test ``f(rank, *args)`` or ``f(rank, world_size, *args)`` run on ``world_size`` processes.

    pytest sees the signature without ``rank`` and ``world_size``, the marker ``dist`` and the group ``processes`` of xdist:
    one worker has the pools.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        arguments = list(signature.parameters.values())[1:]
        rank_only = not arguments or arguments[0].name != "world_size"

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(world_size, function, *args, timeout=timeout, rank_only=rank_only, **kwargs)

        test.__signature__ = signature.replace(parameters=arguments if rank_only else arguments[1:])
        return pytest.mark.xdist_group("processes")(pytest.mark.dist(test))

    return decorate


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = PATIENCE,
    rank_only: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call the module-level ``function(rank, world_size, *args, **kwargs)`` on every rank; `rank_only`: without the size.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        RankError: with the traceback of every rank that raised within ``timeout`` seconds.
    """
    if "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is not at module level; the other processes find it by its name only"
        )
    task = pickle.dumps((function.__module__, function.__qualname__, args, kwargs, rank_only, proofs.are_off()))
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    try:
        return _pools[world_size].run(task, timeout)
    except BaseException as error:
        if not isinstance(error, pytest.skip.Exception):
            _pools.pop(world_size).kill()
        raise


class _Pool:
    """``world_size`` processes, one process group, one pipe to each rank."""

    def __init__(self, world_size: int):
        # The store lives here, so that its port is free by construction.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.crashes = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self.store.port, theirs, self._crash(rank))
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            self._collect(PATIENCE)
        except BaseException:
            self.kill()
            raise

    def _crash(self, rank: int) -> str:
        """Where a rank says what it did when a signal ended it."""
        return f"{self.crashes.name}/{rank}"

    def run(self, task: bytes, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(task)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        """Wait for one reply of each rank; return the values, or raise with every failure."""
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        skips: list[str] = []
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, content = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(GRACE_AFTER_FAILURE)
                    where = Path(self._crash(rank)).read_text()
                    kind, content = "failure", f"process ended with exit code {self.processes[rank].exitcode}\n{where}"
                if kind == "failure":
                    failures[rank] = content
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
                elif kind == "skip":
                    skips.append(content)
                else:
                    values[rank] = content
        silence = "no answer; it may wait for a rank that failed" if failures else f"no answer within {timeout:g} s"
        failures |= {rank: silence for rank in waiting.values()}
        if failures:
            raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))
        if skips:
            pytest.skip(skips[0])
        return [values[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """Let the processes end by themselves; kill those that do not."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_AFTER_FAILURE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.crashes.cleanup()


@atexit.register
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _serve(rank: int, world_size: int, port: int, pipe: Connection, crash_path: str) -> None:
    """Answer tasks until the other end of the pipe is closed; say at `crash_path` where a signal ended it."""
    crash = open(crash_path, "w")  # noqa: SIM115 - stays open: a signal handler writes to it
    faulthandler.enable(crash)
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        # Shorter than torch's default: a rank that hangs must not long outlive a parent that was killed.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE)
        )
        pipe.send_bytes(pickle.dumps(("value", None)))
    except Exception:
        pipe.send_bytes(pickle.dumps(("failure", traceback.format_exc())))
        return
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(rank, world_size, task))


def _answer(rank: int, world_size: int, task: bytes) -> bytes:
    try:
        module, name, args, kwargs, rank_only, unproven = pickle.loads(task)
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        who = (rank,) if rank_only else (rank, world_size)
        with seeded(f"{module}.{name}", rank), proofs.switched_off(unproven):
            return pickle.dumps(("value", function(*who, *args, **kwargs)))
    except pytest.skip.Exception as skip:
        return pickle.dumps(("skip", skip.msg))
    except BaseException:
        return pickle.dumps(("failure", traceback.format_exc()))
