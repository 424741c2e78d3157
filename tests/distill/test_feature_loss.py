"""Losses on layers, against direct formulas: Gram matrices, differences, projected squares; over the tokens that count."""

import pytest
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.distill.loss.feature_loss import FeatureLoss
from gramian.parallel.wrap_data_parallel import blocks_of
from tests.distill.test_features import gram_cka

B, T, D, E = 3, 7, 5, 8
PAIRS = ((0, 0), (1, 2), (3, 4))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def case(dtype: torch.dtype = torch.float64) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
    """Streams of student and teacher, and which tokens count."""
    student = {s: drawn(B, T, D, seed=s, dtype=dtype).requires_grad_() for s, _ in PAIRS}
    teacher = {t: drawn(B, T, E, seed=10 + t, dtype=dtype) for _, t in PAIRS}
    counted_BT = torch.ones(B, T, dtype=torch.bool)
    counted_BT[0, 4:] = counted_BT[2, 1] = False
    return student, teacher, counted_BT


def directly(loss: FeatureLoss, student: dict[int, Tensor], teacher: dict[int, Tensor], counted_BT: Tensor) -> Tensor:
    """As the definitions say, one pair after the other."""
    x = [student[s][counted_BT] for s, _ in loss.pairs]
    y = [teacher[t][counted_BT] for _, t in loss.pairs]
    if loss.kind == "hidden":
        maps = [projector.linear for projector in loss.projectors.values()]  # type: ignore[union-attr]
        found = [((a @ m.weight.T + m.bias - b) ** 2).mean() for m, a, b in zip(maps, x, y, strict=True)]
    elif loss.kind == "cka":
        found = [1 - gram_cka(a, b) for a, b in zip(x, y, strict=True)]
    else:
        found = [1 - gram_cka(x[i + 1] - x[i], y[i + 1] - y[i]) for i in range(len(x) - 1)]
    return torch.stack(found).mean()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["cka", "increments", "hidden"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_it_is_the_formula_with_its_gradient(kind, dtype: torch.dtype, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    student, teacher, counted_BT = case(dtype)
    loss = FeatureLoss(kind, PAIRS, D, E).to(dtype)
    found = loss(student, teacher, counted_BT)
    wide = {s: h.detach().double().requires_grad_() for s, h in student.items()}
    expected = directly(loss.double(), wide, {t: h.double() for t, h in teacher.items()}, counted_BT)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(found, list(student.values()))
    for mine, own in zip(gradients, torch.autograd.grad(expected, list(wide.values())), strict=True):
        torch.testing.assert_close(mine.double(), own, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["cka", "increments", "hidden"])
def test_what_does_not_count_changes_nothing_and_no_token_is_no_gradient(kind) -> None:  # type: ignore[no-untyped-def]
    student, teacher, counted_BT = case()
    loss = FeatureLoss(kind, PAIRS, D, E).double()
    before = loss(student, teacher, counted_BT)
    other = {s: torch.where(counted_BT[..., None], h, 1e3) for s, h in student.items()}
    torch.testing.assert_close(loss(other, teacher, counted_BT), before)
    nothing = loss(student, teacher, torch.zeros_like(counted_BT)) * 0
    assert float(nothing.detach()) == 0
    for gradient in torch.autograd.grad(nothing, list(student.values()), allow_unused=True):
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize("kind", ["cka", "increments", "hidden"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
def test_a_teacher_of_a_narrower_cache_is_read_in_the_students_numbers(kind, narrow: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    student, teacher, counted_BT = case()
    stored = {t: h.to(narrow) for t, h in teacher.items()}
    loss = FeatureLoss(kind, PAIRS, D, E).double()
    found = loss(student, stored, counted_BT)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, directly(loss, student, {t: h.double() for t, h in stored.items()}, counted_BT))


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher, counted_BT = case()
    asked = {t: h.requires_grad_() for t, h in teacher.items()}
    FeatureLoss("cka", PAIRS, D, E)(student, asked, counted_BT).backward()
    assert all(h.grad is None for h in asked.values())
    assert all(h.grad is not None and h.grad.abs().sum() > 0 for h in student.values())


def test_only_hidden_has_projectors_drawn_from_a_seed_of_their_own_and_they_are_no_blocks() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    one, same, other = (FeatureLoss("hidden", PAIRS, D, 100, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert not list(FeatureLoss("cka", PAIRS, D, E).parameters())
    student = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(D, D)]), "features": one})
    assert blocks_of(student) == list(student["blocks"])  # type: ignore[arg-type]
    assert sorted(one.projectors) == ["0-0", "1-2", "3-4"]


def test_a_layer_that_the_signal_lacks_is_named() -> None:
    student, teacher, counted_BT = case()
    del teacher[2]
    with pytest.raises(GramianError, match="^teacher: its signal has no layer 2; expected a cache with it"):
        FeatureLoss("cka", PAIRS, D, E)(student, teacher, counted_BT)


@pytest.mark.parametrize(
    ("kind", "pairs", "says"),
    [
        ("cka", (), '1 or more for "cka"'),
        ("increments", ((1, 1),), '2 or more for "increments"'),
        ("hidden", ((1, 1), (1, 2)), "names a layer twice"),
        ("hidden", ((1, 1), (2, 1)), "names a layer twice"),
        ("increments", ((0, 4), (1, 2)), 'rise on both sides for "increments"'),
        ("increments", ((3, 0), (1, 2)), 'rise on both sides for "increments"'),
    ],
)
def test_pairs_that_cannot_be_are_refused(kind, pairs, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GramianError, match=f"^teacher.feature_pairs: .*{says}"):
        FeatureLoss(kind, pairs, D, E)
