"""A loss term with another coefficient than was stated is seen at the head; soft targets and other losses are not accused."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature.estimate.loss_checks import seen_coefficient
from tests.curvature.small import loss_of, net, opened, words
from tests.curvature.test_precondition import make
from tests.kit.refusals import refusal

ACCUM = 4
Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits [T, V] and labels [T]."""


def divided(y_scale: float = 1.0) -> Loss:
    return lambda z, y: F.cross_entropy(z, y) * y_scale


def teacher(z: Tensor) -> Tensor:
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(5)).to(z).softmax(-1)


RIGHT: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "much smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.6),
    "a teacher's distribution": lambda z, y: F.cross_entropy(z, teacher(z)),
    "half a teacher": lambda z, y: 0.5 * F.cross_entropy(z, y) + 0.5 * F.cross_entropy(z, teacher(z)),
    "a temperature": lambda z, y: F.cross_entropy(z / 2, y),
    "a z-loss": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.logsumexp(-1).square().mean(),
    "classes of different weights": lambda z, y: F.cross_entropy(z, y, torch.linspace(0.5, 2, z.shape[1])),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z)),
    "capped": lambda z, y: F.cross_entropy(z.tanh(), y),
}
"""Nothing to say: the coefficient of a term is as stated, or cannot be known."""


def captured(loss: Loss, model: nn.Module | None = None, **options: Any) -> gramian.KFACNaturalGradient:
    kfac, model, (x, y) = make(**options), model or net(), words()
    with opened(kfac, model, (x, y)):
        loss(model(x).flatten(0, 1), y.flatten()).backward()
    return kfac


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", [1 / ACCUM, 1 / 2, 0.9, 3.0])
def test_a_loss_divided_by_micro_batches_takes_its_coefficient_as_loss_reduction(
    scale: float, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if exact and scale > 1:  # targets would be negative
        with refusal("^head: .*expected softmax cross entropy.*loss_reduction"):
            captured(divided(scale), kfac_true_fisher_head=True)
        return
    with caplog.at_level(logging.WARNING):
        kfac = captured(divided(scale), kfac_true_fisher_head=exact)
    assert kfac.record()["loss_coefficient"] == pytest.approx(scale, rel=1e-3)
    (line,) = [record.getMessage() for record in caplog.records if "loss_reduction" in record.getMessage()]
    assert line.startswith(f"loss_reduction: one loss term has {scale:.4g} times the coefficient") and "\n" not in line
    with refusal("^loss_reduction: one loss term .* .strict=True."):
        captured(divided(scale), strict=True, kfac_true_fisher_head=exact)


def test_what_is_told_is_what_the_factors_are_off_by() -> None:
    right, wrong = captured(divided()), captured(divided(1 / ACCUM))
    seen = wrong.record()["loss_coefficient"]
    for name, block in right.kfac_factors.items():
        assert float(wrong.kfac_factors[name].G.trace()) == pytest.approx(seen**2 * float(block.G.trace()), rel=1e-3)


@pytest.mark.parametrize("kind", RIGHT)
def test_other_losses_are_not_accused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert captured(RIGHT[kind]).record()["loss_coefficient"] is None
    assert "loss_reduction" not in caplog.text


def test_accumulation_with_the_coefficient_of_a_term_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    kfac, model = make(), net()
    batches = [words(seed=seed) for seed in range(ACCUM)]
    terms = batches[0][1].numel()
    with (
        caplog.at_level(logging.WARNING),
        kfac.capture(model, loss_reduction=1 / (ACCUM * terms), num_terms=terms) as cap,
    ):
        for i, batch in enumerate(batches):
            if i:
                cap.next(num_terms=terms)
            (loss_of(model, batch) / ACCUM).backward()
    assert kfac.record()["loss_coefficient"] is None and "loss_reduction" not in caplog.text


def test_the_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    kfac, model = make(), net()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            batch = words(seed=seed)
            with opened(kfac, model, batch):
                (loss_of(model, batch) / 2).backward()
    assert sum("loss_reduction" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("classes", [3, 50, 5000])
def test_every_coefficient_is_read_off_any_logits_and_smoothing_is_not_taken_for_one(
    classes: int, spread: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(classes)
    z = (spread * torch.randn(32, classes, generator=generator)).to(torch.float64)
    y = F.one_hot(torch.randint(classes, (32,), generator=generator), classes).to(z)
    p = z.softmax(-1)
    for c in (0.03, 0.25, 0.5, 2.0):
        found = seen_coefficient(p, (c * (p - y)).to(dtype).to(p))
        assert found == pytest.approx(c, rel=1e-2)
    assert seen_coefficient(p, (p - y).to(dtype).to(p)) is None
    for smoothing in (0.03, 0.1, 0.5, 0.9):
        q = (1 - smoothing) * y + smoothing / classes
        assert seen_coefficient(p, (p - q).to(dtype).to(p)) is None


def test_two_classes_and_uniform_predictions_tell_nothing() -> None:
    y = F.one_hot(torch.arange(8) % 2, 2).double()
    p = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert seen_coefficient(p, (p - y) / 2) is None
    flat = torch.full((8, 5), 0.2, dtype=torch.float64)
    y = F.one_hot(torch.arange(8) % 5, 5).double()
    assert seen_coefficient(flat, (flat - y) / 2) is None
    assert seen_coefficient(flat[:0], flat[:0]) is None


# ---- the second pass of EK-FAC, whose arguments are its own ----------------------------------------------------------


def corrected(loss: Loss, times: int = 1, **options: Any) -> gramian.KFACNaturalGradient:
    """Factors of a loss as stated, then eigenvalues of another one under the same arguments."""
    kfac, model, (x, y) = make(damping_mode="joint", ekfac=True, **options), net(), words()
    with kfac.capture(model, num_terms=y.numel(), correct=False):
        loss_of(model, (x, y)).backward()
    for _ in range(times):
        with kfac.correct(model, num_terms=y.numel()):
            loss(model(x).flatten(0, 1), y.flatten()).backward()
    return kfac


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", [1 / ACCUM, 3.0])
def test_a_second_pass_with_another_coefficient_than_stated_is_told(
    scale: float, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By what the eigenvalues are off: the warning's number is their ratio to those of the loss as it was stated."""
    with caplog.at_level(logging.WARNING):
        wrong = corrected(divided(scale), times=2, kfac_true_fisher_head=exact)
    (line,) = [record.getMessage() for record in caplog.records if "loss_reduction" in record.getMessage()]
    assert line.startswith(f"loss_reduction: one loss term has {scale:.4g} times the coefficient")
    assert f"every eigenvalue of EK-FAC is {scale**2:.4g} times what it is" in line
    assert wrong.record()["loss_coefficient"] == pytest.approx(scale, rel=1e-3)
    right = corrected(divided(), kfac_true_fisher_head=exact)
    assert right.record()["loss_coefficient"] is None
    for name, block in right.kfac_factors.items():
        if block.correction is not None and not (exact and name == right.head):
            there = wrong.kfac_factors[name].correction
            assert there is not None
            torch.testing.assert_close(there.values_RS, scale**2 * block.correction.values_RS, rtol=1e-3, atol=1e-7)


def test_strict_refuses_such_a_second_pass_and_keeps_the_blocks() -> None:
    kfac, model, (x, y) = make(damping_mode="joint", ekfac=True, strict=True), net(), words()
    with kfac.capture(model, num_terms=y.numel(), correct=False):
        loss_of(model, (x, y)).backward()
    before = dict(kfac.kfac_factors)
    with (
        refusal("^loss_reduction: one loss term has 0.5 times .*every eigenvalue.* .strict=True."),
        kfac.correct(model, num_terms=y.numel()),
    ):
        (loss_of(model, (x, y)) / 2).backward()
    assert dict(kfac.kfac_factors) == before and all(block.correction is None for block in before.values())


@pytest.mark.parametrize("kind", RIGHT)
def test_second_passes_of_other_losses_are_not_accused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert corrected(RIGHT[kind]).record()["loss_coefficient"] is None
    assert "loss_reduction" not in caplog.text
