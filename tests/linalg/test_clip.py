"""The clip raises what eigh says it raises, and a shortcut never hides one."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gramian.linalg import Clip, Dense, DiagonalLowRank, LowRank
from gramian.linalg.factors import diagonal_low_rank
from tests.kit.matrix import FULL
from tests.linalg.matrices import CASES, brute_clip, damped_power, distance, normal, positive, probabilities

pytestmark = pytest.mark.oracle

quick = settings(max_examples=300 if FULL else 40)
exponents = st.floats(-4, 1)
conditions = st.floats(0.1, 5).map(lambda e: 10**e)
ALWAYS = ("dense", "low rank", "diagonal", "plus", "softmax")


def assert_clip(actual: Clip, expected: Clip) -> None:
    assert (actual.count, actual.total) == (expected.count, expected.total)
    assert actual.mass == pytest.approx(expected.mass, rel=1e-9, abs=1e-12)
    if expected.count:
        assert actual.floor == pytest.approx(expected.floor, rel=1e-10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("max_condition", [1.5, 50.0, 1e4, 1e9])
def test_count_mass_and_floor_are_those_of_eigh(name: str, max_condition: float) -> None:
    case = CASES[name]()
    for damping in (1e-3, 1.0):
        expected = brute_clip(case.matrix, damping, max_condition)
        assert_clip(case.factor.clip(damping, max_condition), expected)
        assert not (expected.count and case.factor.clips_nothing(damping, max_condition))


@pytest.mark.parametrize("name", CASES)
def test_the_cases_clip_something(name: str) -> None:
    case = CASES[name]()
    clip = case.factor.clip(1e-3, 1.5)
    assert (clip.count > 0) == (name not in ("low rank all zero", "low rank no columns"))
    assert clip.total == case.factor.dim


def test_the_complement_is_counted() -> None:
    u = torch.zeros(9, 2, dtype=torch.float64)
    u[0, 0], u[1, 1] = 10.0, 0.1  # eigenvalues 100, 0.01 and seven zeros
    clip = LowRank.of(u).clip(1.0, 10.0)
    assert (clip.count, clip.total) == (8, 9)
    assert clip.floor == pytest.approx(10.1)
    assert clip.mass == pytest.approx(7 * 9.1 + 9.09)


@pytest.mark.parametrize("name", ["low rank", "low rank wide", "low rank duplicates", "plus", "softmax"])
def test_a_clip_is_that_of_the_dense_factor(name: str) -> None:
    case = CASES[name]()
    dense = Dense.of(case.matrix)
    for max_condition in (3.0, 50.0, 300.0):
        assert_clip(case.factor.clip(1e-2, max_condition), dense.clip(1e-2, max_condition))


def test_no_condition_number_clips_nothing() -> None:
    assert CASES["dense"]().factor.clips_nothing(1e-9, None)


@quick
@given(name=st.sampled_from(ALWAYS), exponent=exponents, condition=conditions, decomposed=st.booleans())
def test_the_shortcut_never_hides_a_clip(name: str, exponent: float, condition: float, decomposed: bool) -> None:
    case = CASES[name]()
    if decomposed:
        case.factor.power(normal(case.factor.dim, 1), -1.0, 1e-3, 1.1)
    expected = brute_clip(case.matrix, 10**exponent, condition)
    shifted = torch.linalg.eigvalsh(case.matrix) + 10**exponent
    assume(float((shifted / expected.floor - 1).abs().min()) > 1e-9)  # nothing on the edge, where rounding decides
    if expected.count:
        assert not case.factor.clips_nothing(10**exponent, condition)
    assert_clip(case.factor.clip(10**exponent, condition), expected)


def test_the_shortcut_is_taken_where_the_damping_is_large() -> None:
    for name in ALWAYS:
        factor = CASES[name]().factor
        assert factor.clips_nothing(float(factor.largest_bound()), 2.0), name


@pytest.fixture
def wide_softmax(monkeypatch: pytest.MonkeyPatch) -> DiagonalLowRank:
    """A softmax head that counts as too wide to be written out."""
    monkeypatch.setattr(diagonal_low_rank, "WIDEST_DENSE", 4)
    p, w = probabilities(12, 5)
    return DiagonalLowRank.softmax(p * w.sqrt(), torch.float64)


@pytest.mark.parametrize("p", [-1.0, -0.5, 0.5, 2.0])
def test_where_single_eigenvalues_are_out_of_reach_the_damping_is_raised(
    wide_softmax: DiagonalLowRank, p: float
) -> None:
    y, m = normal(12, 3, seed=1), CASES["softmax"]().matrix
    actual = wide_softmax.power(y, p, 1e-3, 50.0)
    assert wide_softmax._whole is None
    assert "damping raised to the clip's floor" in wide_softmax.work.clip_note
    assert distance(actual, damped_power(m, y, p, 1e-3, 50.0)) <= wide_softmax.work.error_bound
    clip = wide_softmax.clip(1e-3, 50.0)
    assert clip.count == clip.total == 12
    assert clip.mass == pytest.approx(12 * (clip.floor - 1e-3))
    assert distance(actual, damped_power(m, y, p, clip.floor)) <= 1e-9


def test_an_unreached_clip_leaves_no_note(wide_softmax: DiagonalLowRank) -> None:
    wide_softmax.power(normal(12, 3), -1.0, 0.1, 1e6)
    assert wide_softmax.work.clip_note == ""
    assert wide_softmax.work.error_bound == 0


def test_a_clipped_power_is_the_same_at_every_call() -> None:
    """The first call of a float64 vector decomposes a float32 matrix in float32, then in float64: the floor is the second's."""
    factor, y = Dense.of(positive(30).float()), normal(30, 2)
    assert torch.equal(factor.power(y, -0.5, 1e-3, 50.0), factor.power(y, -0.5, 1e-3, 50.0))
