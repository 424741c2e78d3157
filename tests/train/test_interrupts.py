"""Signals: real ones, sent to real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gramian
from gramian.train.loop.interrupts import SIGNALS, Interrupts
from tests.kit.waiting import PATIENCE

PACKAGE = Path(gramian.__file__).parent
# The package's own imports take a second and are not needed here: its folders alone do.
LOOP = """
import ctypes, os, signal, sys, time, types
for name, folder in (("gramian", {package!r}), ("gramian.train", {package!r} + "/train")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from gramian.train.loop.interrupts import Interrupts
signal.signal(signal.SIGHUP, signal.{hangup})  # under nohup it is ignored
with Interrupts() as interrupts:
    {before}
    print("ready", flush=True)
    while interrupts.requested is None:
        time.sleep(0.01)
    print(interrupts.requested, flush=True)
    {after}
print("left", flush=True)
"""
# Does not return, and never lets Python run a handler: what a hung collective looks like.
STUCK = "ctypes.PyDLL(None).sleep(60)"


@contextmanager
def started(after: str, before: str = "", hangup: str = "SIG_DFL") -> Iterator[subprocess.Popen[str]]:
    code = LOOP.format(package=str(PACKAGE), before=before, after=after, hangup=hangup)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert read(process) == "ready"
        yield process
    finally:
        process.kill()
        process.wait()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_the_step_finish(number: signal.Signals) -> None:
    with started("time.sleep(0.1)") as process:
        process.send_signal(number)
        assert read(process) == number.name
        assert read(process) == "left"
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_ends_the_process_at_once_even_inside_c(first: signal.Signals, second: signal.Signals) -> None:
    with started(STUCK) as process:
        process.send_signal(first)
        assert read(process) == first.name
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(PATIENCE) == -second
        assert read(process) == ""


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    with started("", hangup="SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert read(process) == "SIGTERM"
        process.send_signal(signal.SIGHUP)
        assert read(process) == "left" and process.wait(PATIENCE) == 0


def test_what_was_there_is_restored_and_nothing_is_noted_after() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyError), Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) not in before
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested == "SIGTERM"
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)
        raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert interrupts.requested == "SIGTERM"


def test_nested_ones_give_back_the_outer_one() -> None:
    with Interrupts() as outer:
        with Interrupts() as inner:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert (outer.requested, inner.requested) == ("SIGINT", None)


def test_another_thread_leaves_signals_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[object] = []

    def body() -> None:
        with Interrupts() as interrupts:
            seen.extend(signal.getsignal(number) for number in SIGNALS)
            seen.append(interrupts.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [*before, None]


@pytest.mark.parametrize("number, lives", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_forked_worker_outlives_the_first_ctrl_c_but_no_sigterm(number: signal.Signals, lives: bool) -> None:
    # A signal that comes before Python has noticed that it was forked is lost: the worker says when it is there.
    fork = (
        "there, told = os.pipe(); worker = os.fork()\n"
        "    if not worker: os.write(told, b'.'); time.sleep(600); os._exit(0)\n"
        "    os.read(there, 1)"
    )
    # Waiting for an end has no deadline that a busy machine could miss (the worker ends by itself after ten minutes, with 0).
    look = "time.sleep(0.3); print(os.waitpid(worker, os.WNOHANG)[0] == 0); os.kill(worker, 9)"
    wait = f"print(os.waitpid(worker, 0)[1] != {int(number)})"
    with started(f"os.kill(worker, {int(number)}); {look if lives else wait}", fork) as process:
        process.send_signal(signal.SIGINT)
        assert [read(process) for _ in range(3)] == ["SIGINT", str(lives), "left"]
