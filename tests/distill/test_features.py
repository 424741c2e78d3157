"""Similarity of features: against Gram matrices in float64, invariances, gradients, numbers that overflow half precision."""

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.loss.features import Projector, cka_loss, debiased_cka, linear_cka


def drawn(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def related(n: int = 60, d: int = 7, e: int = 11) -> tuple[Tensor, Tensor]:
    x_ND = drawn(n, d, 0)
    return x_ND, x_ND @ drawn(d, e, 1) + 0.5 * drawn(n, e, 2)


def gram_cka(x_ND: Tensor, y_NE: Tensor) -> Tensor:
    """By N×N Gram matrices with a centring matrix."""
    n = len(x_ND)
    centre_NN = torch.eye(n, dtype=torch.float64) - 1 / n
    K, L = (centre_NN @ t @ t.T @ centre_NN for t in (x_ND, y_NE))
    return torch.trace(K @ L) / (torch.trace(K @ K) * torch.trace(L @ L)).sqrt()


def gram_debiased_cka(x_ND: Tensor, y_NE: Tensor) -> Tensor:
    """By HSIC as a mean over all ordered quadruples of different tokens, which is what "unbiased" means."""
    n = len(x_ND)
    K, L = x_ND @ x_ND.T, y_NE @ y_NE.T
    i, j, q, r = (t.flatten() for t in torch.meshgrid(*[torch.arange(n)] * 4, indexing="ij"))
    different = (i != j) & (i != q) & (i != r) & (j != q) & (j != r) & (q != r)
    i, j, q, r = (t[different] for t in (i, j, q, r))

    def hsic(A: Tensor, C: Tensor) -> Tensor:
        return (A[i, j] * (C[i, j] + C[q, r] - 2 * C[i, q])).mean()

    return hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()


def standardised(t: Tensor) -> Tensor:
    return (t - t.mean(0)) / t.std(0, correction=0)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("standardise", [False, True])
def test_cka_is_that_of_the_gram_matrices(standardise: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, y = related()
    found = linear_cka(x.to(dtype), y.to(dtype), standardise=standardise)
    expected = gram_cka(standardised(x), standardised(y)) if standardise else gram_cka(x, y)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cka_loss(x, y), 1 - gram_cka(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("standardise", [False, True])
def test_debiased_cka_is_the_mean_over_quadruples(standardise: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, y = related(n=13, d=5, e=6)
    found = debiased_cka(x.to(dtype), y.to(dtype), standardise=standardise)
    expected = gram_debiased_cka(standardised(x), standardised(y)) if standardise else gram_debiased_cka(x, y)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_unrelated_features_are_alike_by_cka_and_not_when_debiased() -> None:
    pairs = [(drawn(40, 64, 2 * i), drawn(40, 64, 2 * i + 1)) for i in range(20)]
    assert min(linear_cka(x, y) for x, y in pairs) > 0.5
    assert abs(sum(debiased_cka(x, y) for x, y in pairs) / 20) < 0.02


@pytest.mark.parametrize("measure", [linear_cka, debiased_cka])
def test_orthogonal_maps_scales_and_shifts_change_nothing(measure) -> None:
    x, y = related()
    turn = torch.linalg.qr(drawn(7, 7, 5)).Q
    before = measure(x, y, standardise=False)
    torch.testing.assert_close(measure(x @ turn, y, standardise=False), before, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(measure(-300 * x + 17, y, standardise=False), before, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(measure(x, x @ turn, standardise=False), torch.ones((), dtype=x.dtype))
    shear = torch.eye(7, dtype=x.dtype).index_fill(0, torch.tensor([0]), 3.0)
    assert abs(measure(x @ shear, y, standardise=False) - before) > 1e-3


@pytest.mark.parametrize("measure", [linear_cka, debiased_cka])
def test_standardised_channels_may_have_any_scale(measure) -> None:
    x, y = related()
    scales = torch.tensor([1e-3, 1.0, 1.0, 5e3, 1.0, 2.0, 0.1], dtype=x.dtype)
    torch.testing.assert_close(
        measure(scales * x, y, standardise=True), measure(x, y, standardise=True), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("measure", [linear_cka, debiased_cka])
def test_rows_in_another_order_are_other_features(measure) -> None:
    x, y = related()
    assert measure(x, y) > 0.5
    assert measure(x, y.roll(1, 0)) < measure(x, y) - 0.3
    with pytest.raises(GramianError, match="^features: .*same tokens"):
        measure(x, y[:-1])


@pytest.mark.parametrize("loss", [cka_loss, debiased_cka])
def test_the_gradient_reaches_the_student_and_is_right(loss) -> None:
    x, y = related(n=9, d=3, e=4)
    assert torch.autograd.gradcheck(lambda x: loss(x, y), x.requires_grad_())


@pytest.mark.parametrize("loss", [cka_loss, debiased_cka])
def test_huge_and_constant_features_give_finite_numbers(loss) -> None:
    x, y = related(n=64, d=32, e=32)
    huge = (6e4 * x / x.abs().max()).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(huge, y.half())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), loss(huge.detach().double(), y.half().double()), rtol=1e-3, atol=1e-4)
    found.backward()
    assert huge.grad is not None and huge.grad.isfinite().all()
    assert huge.grad.abs().max() > 0 or loss is debiased_cka  # 1e-7 is the smallest half
    flat = torch.full((64, 3), 0.1).requires_grad_()
    loss(flat, y.float()).backward()
    assert flat.grad is not None and flat.grad.eq(0).all()


def test_a_constant_channel_says_nothing() -> None:
    x, y = related()
    wider = torch.cat([x, torch.full((60, 1), 1000.1)], dim=1).float()
    torch.testing.assert_close(
        linear_cka(wider, y.float(), standardise=True), linear_cka(x.float(), y.float(), standardise=True)
    )


def test_the_projector_is_a_linear_map_that_teaches_the_student() -> None:
    student = drawn(5, 400, 0).float().requires_grad_()
    projector = Projector(400, 300)
    projected = projector(student)
    assert projected.shape == (5, 300)
    assert projected.std().item() == pytest.approx(1.0, rel=0.1)
    torch.testing.assert_close(projector(2 * student), 2 * projected)
    projected.square().mean().backward()
    assert student.grad is not None and student.grad.abs().max() > 0
    assert all(p.grad is not None for p in projector.parameters())


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("measure", [linear_cka, debiased_cka])
def test_tokens_that_do_not_count_are_as_if_they_were_not_there(measure, standardise: bool) -> None:
    x, y = related()
    counted = torch.arange(60) % 3 > 0
    expected = measure(x[counted], y[counted], standardise=standardise)
    x[~counted], y[~counted] = torch.nan, 1e30
    found = measure(x.view(4, 15, 7), y.view(4, 15, 11), counted.view(4, 15), standardise=standardise)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert measure(x, y, torch.zeros(60)) == 0
    assert torch.autograd.grad(measure(x.requires_grad_(), y, torch.arange(60) == 1), x)[0].eq(0).all()


@pytest.mark.parametrize("measure", [cka_loss, debiased_cka])
def test_compiles_to_one_graph(measure) -> None:
    x, y = related()
    torch.testing.assert_close(torch.compile(measure, fullgraph=True, backend="aot_eager")(x, y), measure(x, y))
