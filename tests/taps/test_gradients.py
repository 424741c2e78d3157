"""Per-sample gradients that are never written down answer every question as the written-out ones do.

Legend: B samples, T tokens, M×N the parameter, V rows of a table, K images per sample.
"""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gramian.kernels.norms.gram_squares import gram_squares_of_layers
from gramian.plan import norm_algorithm as plan
from gramian.taps.gradients import Convolved, ExplicitGradient, Indexed, Outer, PerSampleGradient, Summed, join
from gramian.taps.gradients.convolved import Geometry
from gramian.taps.gradients.directions import Directions
from gramian.taps.gradients.joined import Joined
from gramian.taps.units import Units
from tests.kit.refusals import refusal

pytestmark = pytest.mark.oracle

EXACT = {"rtol": 1e-9, "atol": 1e-12}


@dataclass
class Written:
    """A gradient beside what it stands for, by explicit loops."""

    gradient: PerSampleGradient
    tensors: list[Tensor]
    """What the gradient was made from."""
    rows_B: Tensor
    """[B, *shape]: the gradient of each sample."""
    tokens_BT: Tensor | None
    """[B, T, *shape]: the gradient of each token, None where the token is the sample."""


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(B: int, T: int, shape: tuple[int, int]) -> Written:
    left, right = _randn(B, T, shape[0]), _randn(B, T, shape[1])
    tokens = torch.einsum("btm,btn->btmn", left, right)
    return Written(Outer(left, right), [left, right], tokens.sum(1), tokens)


def summed(B: int, T: int, shape: tuple[int, ...]) -> Written:
    tokens = _randn(B, T, torch.Size(shape).numel())
    written = tokens.reshape(B, T, *shape)
    return Written(Summed(tokens, shape), [tokens], written.sum(1), written)


def indexed(B: int, T: int, shape: tuple[int, int]) -> Written:
    index, rows = torch.randint(shape[0], (B, T)), _randn(B, T, shape[1])
    tokens = _randn(B, T, *shape) * 0
    for b in range(B):
        for t in range(T):
            tokens[b, t, index[b, t]] = rows[b, t]
    return Written(Indexed(index, rows, shape[0]), [index, rows], tokens.sum(1), tokens)


def convolved(B: int, T: int, shape: tuple[int, ...]) -> Written:
    """A kernel of shape [O, C, h, w] in one group, T images of one sample."""
    geometry = Geometry(tuple(shape), (1, 2), (1, 0), (1, 1), 1)
    images = _randn(B, T, shape[1], shape[2] + 1, shape[3] + 2)
    weight = _randn(*shape).requires_grad_()
    sizes = F.conv2d(_randn(1, *images.shape[2:]), weight, stride=(1, 2), padding=(1, 0)).shape[1:]
    output_gradients = _randn(B, T, *sizes)
    rows = _randn(B, *shape) * 0
    for b in range(B):
        for t in range(T):
            output = F.conv2d(images[b, t][None], weight, stride=(1, 2), padding=(1, 0))
            rows[b] += torch.autograd.grad(output, weight, output_gradients[b, t][None])[0]
    return Written(Convolved(images, output_gradients, geometry), [images, output_gradients], rows, None)


def dense(B: int, T: int, shape: tuple[int, ...]) -> Written:
    rows = _randn(B, *shape)
    return Written(ExplicitGradient(rows), [rows], rows.clone(), None)


def joined(*makers: object) -> object:
    def make(B: int, T: int, shape: tuple[int, ...]) -> Written:
        parts = [maker(B, T + (k % 2), shape) for k, maker in enumerate(makers)]  # type: ignore[operator]
        with_tokens = [p.rows_B[:, None] if p.tokens_BT is None else p.tokens_BT for p in parts]
        return Written(
            join([part.gradient for part in parts]),
            [t for part in parts for t in part.tensors],
            torch.stack([part.rows_B for part in parts]).sum(0),
            torch.cat(with_tokens, dim=1),
        )

    return make


FORMS = {
    "Outer": outer,
    "Summed": summed,
    "Indexed": indexed,
    "Convolved": convolved,
    "Dense": dense,
    "Outer + Outer": joined(outer, outer),
    "Summed + Summed": joined(summed, summed),
    "Indexed + Indexed": joined(indexed, indexed, indexed),
    "Outer + Indexed": joined(outer, indexed),
    "Indexed + Outer": joined(indexed, outer),
    "Outer + Dense": joined(outer, dense),
    "Dense + Dense": joined(dense, dense),
    "Summed + Dense": joined(summed, dense),
    "Convolved + Convolved": joined(convolved, convolved),
    "Outer + Indexed + Outer + Dense": joined(outer, indexed, outer, dense),
}
FOUR_AXES = {"Convolved", "Convolved + Convolved"}
ANY_SHAPE = {"Summed", "Dense", "Summed + Summed", "Dense + Dense", "Summed + Dense"}

every_form = pytest.mark.parametrize("form", FORMS)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, list[int], int]:
    """B, T, enough axes for any form, a seed."""
    axes = draw(st.lists(st.integers(1, 4), min_size=4, max_size=4))
    return draw(st.integers(0, 4)), draw(st.integers(0, 5)), axes, draw(st.integers(0, 1 << 16))


def _make(form: str, size: tuple[int, int, list[int], int]) -> Written:
    B, T, axes, seed = size
    torch.manual_seed(seed)
    count = 4 if form in FOUR_AXES else seed % 4 if form in ANY_SHAPE else 2
    return FORMS[form](B, T, tuple(axes[:count]))  # type: ignore[operator]


def _several(test: object) -> object:
    return settings(max_examples=15)(given(size=sizes())(test))


def _squares(rows_B: Tensor) -> Tensor:
    return rows_B.reshape(rows_B.shape[0], rows_B[:1].numel() if len(rows_B) else 0).square().sum(1)


# ---- what each form answers -----------------------------------------------------------------------------------------


@every_form
@_several
def test_gradients_written_out_sums_and_shapes_are_those_of_explicit_loops(
    form: str, size: tuple[int, int, list[int], int]
) -> None:
    written = _make(form, size)
    gradient = written.gradient
    assert (gradient.batch, *gradient.shape) == tuple(written.rows_B.shape)
    torch.testing.assert_close(gradient.per_sample(), written.rows_B, **EXACT)
    torch.testing.assert_close(gradient.total(), written.rows_B.sum(0), **EXACT)


@every_form
@_several
def test_squared_norms_of_every_algorithm_are_those_of_explicit_loops(
    form: str, size: tuple[int, int, list[int], int]
) -> None:
    written = _make(form, size)
    for choice in plan.ALGORITHMS:
        torch.testing.assert_close(written.gradient.squared_norms(choice), _squares(written.rows_B), **EXACT)


@every_form
@_several
def test_squares_per_sample_and_per_token_are_those_of_explicit_loops(
    form: str, size: tuple[int, int, list[int], int]
) -> None:
    written = _make(form, size)
    torch.testing.assert_close(written.gradient.sum_of_squares(), written.rows_B.square().sum(0), **EXACT)
    tokens = written.rows_B[:, None] if written.tokens_BT is None else written.tokens_BT
    if form in FOUR_AXES and isinstance(written.gradient, Joined):
        return  # a convolution's token is the whole sample, of each use by itself
    torch.testing.assert_close(written.gradient.token_squares(), tokens.square().sum((0, 1)), **EXACT)


@every_form
@_several
def test_magnitude_bounds_the_norm_of_the_total(form: str, size: tuple[int, int, list[int], int]) -> None:
    gradient = _make(form, size).gradient
    assert gradient.magnitude().dim() == 0
    assert gradient.magnitude() >= gradient.total().norm() - 1e-12


@every_form
@_several
def test_projected_terms_add_up_to_the_projection_of_the_sum(form: str, size: tuple[int, int, list[int], int]) -> None:
    gradient = _make(form, size).gradient
    directions = Directions(gradient.shape, torch.device("cpu"))
    left_MK, right_NK = directions.sides(torch.float64)
    total_MN = gradient.total().reshape(len(left_MK), len(right_NK))
    expected_K = torch.einsum("mk,mn,nk->k", left_MK, total_MN, right_NK)
    torch.testing.assert_close(gradient.projected(directions).sum(0), expected_K, **EXACT)


@every_form
@_several
def test_select_is_a_slice_of_the_samples(form: str, size: tuple[int, int, list[int], int]) -> None:
    written = _make(form, size)
    start, stop = size[0] // 3, size[0] - size[0] // 4
    part = written.gradient.select(start, stop)
    assert part.batch == stop - start
    torch.testing.assert_close(part.per_sample(), written.rows_B[start:stop], **EXACT)
    torch.testing.assert_close(part.squared_norms(), _squares(written.rows_B[start:stop]), **EXACT)


@every_form
@_several
def test_regroup_by_row_sums_the_rows_of_a_unit_before_anything_is_squared(
    form: str, size: tuple[int, int, list[int], int]
) -> None:
    written = _make(form, size)
    ids = torch.randint(3, (size[0],))
    units = Units.of(ids, size[0])
    regrouped = written.gradient.regroup(units)
    expected = written.rows_B.new_zeros(units.count, *written.rows_B.shape[1:])
    for row, unit in enumerate(ids.tolist()):
        expected[unit] += written.rows_B[row]
    assert_rows(regrouped, expected)
    torch.testing.assert_close(regrouped.total(), written.rows_B.sum(0), **EXACT)


def assert_rows(gradient: PerSampleGradient, expected_B: Tensor) -> None:
    """Gradients written out, and their squared norms by every algorithm."""
    torch.testing.assert_close(gradient.per_sample(), expected_B, **EXACT)
    for choice in plan.ALGORITHMS:
        torch.testing.assert_close(gradient.squared_norms(choice), _squares(expected_B), **EXACT)


@pytest.mark.parametrize("form", ["Outer", "Summed", "Indexed"])
@_several
def test_regroup_by_token_sums_the_tokens_of_a_unit(form: str, size: tuple[int, int, list[int], int]) -> None:
    written = _make(form, size)
    assert written.tokens_BT is not None
    ids = torch.randint(4, (size[0], size[1]))
    units = Units.of(ids, size[0])
    regrouped = written.gradient.regroup(units)
    expected = written.rows_B.new_zeros(units.count, *written.rows_B.shape[1:])
    for b in range(size[0]):
        for t in range(size[1]):
            expected[ids[b, t]] += written.tokens_BT[b, t]
    assert_rows(regrouped, expected)
    torch.testing.assert_close(regrouped.token_squares(), written.gradient.token_squares(), **EXACT)


@pytest.mark.parametrize("form", ["Convolved", "Dense"])
def test_a_form_that_cannot_tell_tokens_apart_says_so(form: str) -> None:
    gradient = _make(form, (2, 3, [2, 2, 2, 2], 1)).gradient
    with refusal(r"^sample_ids: .*expected ids of shape \[B\]"):
        gradient.regroup(Units.of(torch.zeros(2, 3, dtype=torch.long), 2))


@every_form
@_several
def test_a_copy_owns_its_tensors(form: str, size: tuple[int, int, list[int], int]) -> None:
    written = _make(form, size)
    copy = written.gradient.copy()
    for t in written.tensors:
        t.zero_()
    torch.testing.assert_close(copy.per_sample(), written.rows_B, **EXACT)
    torch.testing.assert_close(copy.squared_norms(), _squares(written.rows_B), **EXACT)


@every_form
def test_chunks_of_samples_change_nothing(form: str) -> None:
    written = _make(form, (5, 3, [3, 2, 2, 2], 2))
    with mock.patch.object(plan, "CHUNK_ELEMENTS", 13):
        assert len(list(written.gradient.chunks())) > 1
        for choice in plan.ALGORITHMS:
            torch.testing.assert_close(written.gradient.squared_norms(choice), _squares(written.rows_B), **EXACT)
        torch.testing.assert_close(written.gradient.sum_of_squares(), written.rows_B.square().sum(0), **EXACT)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_operands_are_accumulated_in_float32(half: torch.dtype) -> None:
    # 2560 tokens of 1: a half accumulator stops at 256 or 2048.
    ones = torch.ones(2, 2560, 3, dtype=half)
    index = torch.zeros(2, 2560, dtype=torch.long)
    geometry = Geometry((3, 3, 1), (1,), (0,), (1,), 1)
    for gradient in (
        Outer(ones, ones),
        Summed(ones),
        Indexed(index, ones, 1),
        Convolved(ones.mT[:, None], ones.mT[:, None], geometry),
        join([Outer(ones[:, :, :1], ones), Indexed(index, ones, 1)]),
    ):
        weight = 2 if isinstance(gradient, Joined) else 1
        assert gradient.dtype == half
        assert gradient.per_sample().dtype == gradient.total().dtype == torch.float32
        assert torch.equal(gradient.per_sample(), torch.full_like(gradient.per_sample(), weight * 2560))
        assert torch.equal(gradient.total(), torch.full_like(gradient.total(), weight * 5120))
        count = torch.Size(gradient.shape).numel()
        for choice in plan.ALGORITHMS:
            expected = torch.full((2,), count * (weight * 2560.0) ** 2)
            torch.testing.assert_close(gradient.squared_norms(choice), expected, rtol=1e-6, atol=0)


def test_joining_one_use_changes_nothing_and_joining_equal_forms_keeps_the_form() -> None:
    first, second = outer(2, 3, (4, 5)), outer(2, 4, (4, 5))
    assert join([first.gradient]) is first.gradient
    assert isinstance(join([first.gradient, second.gradient]), Outer)
    assert isinstance(join([first.gradient, indexed(2, 3, (4, 5)).gradient]), Joined)


def test_the_grams_of_a_record_are_computed_once() -> None:
    gradient = outer(3, 4, (50, 60)).gradient
    assert isinstance(gradient, Outer)
    with mock.patch("gramian.taps.gradients.outer.gram_squares_of_layers", wraps=gram_squares_of_layers) as grams:
        for _ in range(3):
            gradient.squared_norms("gram")
    assert grams.call_count == 1


# ---- choosing -------------------------------------------------------------------------------------------------------


@given(T=st.integers(1, 64), M=st.integers(1, 64), N=st.integers(1, 64))
@settings(max_examples=100)
def test_the_chosen_algorithm_is_the_one_with_fewer_operations(T: int, M: int, N: int) -> None:
    direct, gram = 2 * T * M * N, 2 * T * T * (M + N)
    expected = "rank1" if T == 1 else "gram" if gram < direct else "direct"
    assert plan.choose(T, M, N) == expected


# ---- cancellation ---------------------------------------------------------------------------------------------------


def _naive(gradient: Outer) -> Tensor:
    left, right = gradient.left_BTM, gradient.right_BTN
    return ((left @ left.mT) * (right @ right.mT)).sum((1, 2))


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected) / expected).abs().max())


def _cancelling(mean: float, signs: str, T: int = 48, M: int = 96, N: int = 128) -> Outer:
    """Activations with a large common part, up to sign, and output gradients whose sum with those signs is about zero.

    The gradient is Σ_t g_t (a_t)ᵀ with the common part gone; each entry of the Grams is large.
    """
    torch.manual_seed(8)
    s_T1 = torch.ones(T, 1, dtype=torch.float64)
    if signs == "alternating":
        s_T1[1::2] = -1
    elif signs == "random":
        s_T1 = torch.randn(T, 1, dtype=torch.float64).sign()
    a_BTN = s_T1 * mean * torch.rand(1, 1, N, dtype=torch.float64) + torch.randn(3, T, N, dtype=torch.float64)
    g_BTM = torch.randn(3, T, M, dtype=torch.float64)
    g_BTM = g_BTM - s_T1 * (s_T1 * g_BTM).mean(1, keepdim=True)
    return Outer(g_BTM.float(), a_BTN.float())


@pytest.mark.parametrize("signs", ["equal", "alternating", "random"])
def test_gram_norms_stay_accurate_in_float32_where_the_naive_formula_is_off(signs: str) -> None:
    gradient = _cancelling(2e4, signs)
    expected = Outer(gradient.left_BTM.double(), gradient.right_BTN.double()).per_sample().flatten(1).square().sum(1)
    # The naive sum is wrong in its second digit, if not negative.
    assert _relative(_naive(gradient), expected) > 1e-2
    direct = gradient.per_sample().flatten(1).square().sum(1)
    allowed = max(1e-4, 4 * _relative(direct, expected))
    assert _relative(gradient.squared_norms("gram").sqrt(), expected.sqrt()) <= allowed


@pytest.mark.parametrize("signs", ["equal", "alternating", "random"])
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0, 30.0, 100.0, 300.0, 1000.0])
def test_gram_norms_are_within_1e_4_in_float32_at_every_degree_of_cancellation(mean: float, signs: str) -> None:
    gradient = _cancelling(mean, signs)
    expected = Outer(gradient.left_BTM.double(), gradient.right_BTN.double()).per_sample().flatten(1).square().sum(1)
    assert _relative(gradient.squared_norms("gram").sqrt(), expected.sqrt()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mean", [3.0, 10.0, 30.0])
def test_gram_norms_are_within_1e_4_in_float32_for_wide_layers_and_long_rows(mean: float) -> None:
    gradient = _cancelling(mean, "equal", T=200, M=512, N=2048)
    expected = Outer(gradient.left_BTM.double(), gradient.right_BTN.double()).per_sample().flatten(1).square().sum(1)
    assert _relative(gradient.squared_norms("gram").sqrt(), expected.sqrt()) <= 1e-4


def test_gram_norms_of_a_gradient_that_cancels_altogether_are_zero_up_to_rounding() -> None:
    left, right = torch.randn(2, 1, 40).repeat(1, 4, 1), torch.randn(2, 1, 50).repeat(1, 4, 1)
    left[:, ::2] *= -1
    gradient = Outer(left, right)
    assert (gradient.squared_norms("gram") >= 0).all()
    assert gradient.squared_norms("gram").sqrt().max() <= 1e-5 * gradient.magnitude()


@pytest.mark.parametrize("left_over", [1e-1, 1e-2, 1e-3, 0.0])
def test_uses_that_cancel_each_other_are_joined_without_losing_digits(left_over: float) -> None:
    """A head and an embedding of one table whose gradients are opposite but for a small rest."""
    torch.manual_seed(9)
    T, V, D = 5, 11, 7
    index = torch.stack([torch.randperm(V)[:T] for _ in range(3)])
    rows = torch.randn(3, T, D)
    head = Outer(F.one_hot(index, V).float(), -rows + left_over * torch.randn(3, T, D))
    both = join([head, Indexed(index, rows, V)])
    exact = Outer(head.left_BTM.double(), head.right_BTN.double()).per_sample()
    expected = (exact + Indexed(index, rows.double(), V).per_sample()).flatten(1).square().sum(1)
    for choice in plan.ALGORITHMS:
        found = both.squared_norms(choice)
        torch.testing.assert_close(found.double().sqrt(), expected.sqrt(), rtol=1e-4, atol=1e-5)
