"""Random numbers of every test from its name and one seed: a pytest plugin.

A test draws the same numbers alone, in any order and on any worker. ``make test`` has seed 0, so its outcome is a function
of the code; with ``GRAMIAN_FULL=1`` the seed is new on every run and printed. ``GRAMIAN_SEED=n`` repeats a run.
"""

import hashlib
import os
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis.internal.conjecture import providers

from tests.kit.matrix import FULL

VARIABLE = "GRAMIAN_SEED"
# In the environment, so that xdist's workers have the same one; so has the order of their sets of strings.
SEED = int(os.environ.setdefault(VARIABLE, str(int.from_bytes(os.urandom(4)) if FULL else 0)))
os.environ.setdefault("PYTHONHASHSEED", str(SEED % 2**32))

# No example may depend on an earlier run (database) or on how busy the machine is (deadline, too_slow).
hypothesis.settings.register_profile(
    "gramian",
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
hypothesis.settings.load_profile("gramian")
# Hypothesis mixes in constants from the source of whatever happens to be imported: other examples on every worker.
assert callable(providers._get_local_constants)
providers._get_local_constants = lambda: providers._local_constants

if not torch.cuda.is_available():
    # torch.manual_seed formats the stack for devices that are not there: 0.9 of its 1.3 ms, several times in every test.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None


def seed_of(name: str) -> int:
    """64 bits from the run's seed and a name; xdist's group is not part of the name."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {name.partition('@')[0]}".encode()).digest()[:8])


@contextmanager
def seeded(name: str, rank: int = 0) -> Iterator[int]:
    """Seed the generators of torch, numpy and Python with `seed_of(name)`; give back their states after.

    Secret keys come from `os.urandom`: it is a stream of the same seed, another one on every rank.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate(), os.urandom
    seed = seed_of(name)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    os.urandom = random.Random(f"{seed} {rank}").randbytes
    try:
        yield seed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        os.urandom = states[3]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with seeded(item.nodeid) as seed:
        function = getattr(item, "function", None)
        if hypothesis.is_hypothesis_test(function):
            hypothesis.seed(seed)(function)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """A fixture that several tests share has numbers of its own: which of them comes first differs from run to run."""
    if fixturedef.scope == "function":
        return (yield)
    with seeded(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """A module that draws when it is imported draws the same."""
    with seeded(collector.nodeid):
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if SEED and reporter is not None:
        reporter.write_line(f"seed {SEED}; {VARIABLE}={SEED} repeats these examples")
