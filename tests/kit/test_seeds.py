"""Two runs draw the same numbers, whichever tests run in which order; another seed draws others."""

import os
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck

from tests.kit.fresh import run_fresh
from tests.kit.seeds import VARIABLE, seeded

ROOT = Path(__file__).parents[2]
DRAWS = """
import os, random, sys
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

def draws():
    return torch.rand(()).item(), np.random.rand(), random.random(), os.urandom(4)

def note(*what):
    print(*what, file=open("drawn", "a"))

AT_IMPORT = draws()

@pytest.fixture(scope="module")
def shared():
    return draws()

@pytest.mark.parametrize("way", ["one", "two"])
def test_draws(shared, way):
    import constants  # of a module that is imported later in one of the runs
    note("draws", way, AT_IMPORT, shared, draws())

@settings(max_examples=60)
@given(st.integers(), st.floats(), st.binary())
def test_examples(i, x, some):
    note("example", i, x, some, torch.rand(()).item())
"""
RUN = f"""
import os, sys
seed, folder, *tests = sys.argv[1:]
os.environ["{VARIABLE}"] = seed
os.chdir(folder)
sys.path.insert(0, {str(ROOT)!r})
import pytest
sys.exit(pytest.main(["-q", "-p", "tests.kit.seeds", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", *tests]))
"""


@pytest.mark.full
@pytest.mark.xdist_group("fresh")
def test_a_run_is_a_function_of_its_seed(tmp_path: Path) -> None:
    def drawn(seed: int, *tests: str) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "test_draws.py").write_text(DRAWS)
        (folder / "constants.py").write_text("SOME = 123456, 234567, 345678, 0.375, 1.625, b'one'")
        done = run_fresh(RUN, str(seed), str(folder), *(f"test_draws.py::{test}" for test in tests))
        assert done.returncode == 0, done.stdout + done.stderr
        return (folder / "drawn").read_text().splitlines()

    names = ("test_draws[one]", "test_draws[two]", "test_examples")
    whole = drawn(0, *names)
    assert len(whole) == len(set(whole)) == 62
    assert drawn(0, *names[::-1]) == [*whole[2:], whole[1], whole[0]]
    assert not set(drawn(1, *names)) & set(whole)


def test_no_test_of_hypothesis_has_settings_that_depend_on_the_run(request: pytest.FixtureRequest) -> None:
    found = [item.function for item in request.session.items if item.get_closest_marker("hypothesis")]
    for function in found:
        chosen = function._hypothesis_internal_use_settings
        assert chosen.database is None and chosen.deadline is None, function
        assert HealthCheck.too_slow in chosen.suppress_health_check, function
    assert hypothesis.settings.get_current_profile_name() == "gramian"


def test_states_are_given_back_and_ranks_have_keys_of_their_own() -> None:
    def states() -> list[bytes]:
        return [
            torch.get_rng_state().numpy().tobytes(),
            np.random.get_state()[1].tobytes(),
            repr(random.getstate()).encode(),
        ]

    before, urandom, drawn = states(), os.urandom, []
    for rank in (0, 1, 0):
        with seeded("some name", rank):
            drawn.append((torch.rand(()).item(), np.random.rand(), random.random(), os.urandom(8)))
    assert states() == before and os.urandom is urandom
    assert drawn[0] == drawn[2] and drawn[0][:3] == drawn[1][:3] and drawn[0][3] != drawn[1][3]
