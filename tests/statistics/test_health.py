"""Activation and gradient health against plain hooks on the same layers."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import gramian
from tests.kit.matrix import sample
from tests.kit.models import CASES
from tests.statistics.problems import assert_health, health_by_hooks, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]


@pytest.mark.parametrize("name, reduction", sample([*itertools.product(CASES, ("mean", "sum"))], 23))
def test_norms_and_zeros_are_those_of_hooks(name: str, reduction: str) -> None:
    p = problem(name, 4)
    model, health = p.model(), gramian.Health()
    with gramian.observe(model, health, loss_reduction=reduction) as seen:
        p.backward(model, p.batch, reduction)
    assert_health(seen[health], health_by_hooks(name, 4), p.tolerance)


def test_a_layer_that_was_not_called_has_nothing_to_say() -> None:
    p = problem("unused", 4)
    model, health = p.model(), gramian.Health()
    with gramian.observe(model, health) as seen:
        p.backward(model, p.batch)
    spare = seen[health]["spare"]
    assert math.isnan(spare.activation_norm)
    assert math.isnan(spare.gradient_norm)
    assert spare.nonfinite == 0


def test_dead_units_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].bias[:6] = -100.0
        model[0].bias[6:] = 100.0
    health = gramian.Health()
    with gramian.observe(model, health) as seen:
        model(torch.randn(10, 4, dtype=torch.float64)).square().mean(1).mean().backward()
    assert seen[health]["2"].zero_fraction == 0.75


def test_the_gradient_norm_is_that_of_one_samples_loss_whatever_the_batch() -> None:
    model = nn.Linear(3, 2).double()
    for reduction, scale in (("mean", 1 / 50), ("sum", 1.0)):
        health = gramian.Health()
        with gramian.observe(model, health, loss_reduction=reduction) as seen:
            (model(torch.randn(50, 3, dtype=torch.float64)).sum() * scale).backward()
        assert seen[health][""].gradient_norm == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("scale", [4096.0, "scaler"])
def test_the_loss_scale_is_undone(scale: float | str) -> None:
    model, health = nn.Linear(3, 2).double(), gramian.Health()
    scale = torch.amp.GradScaler("cpu", init_scale=4096.0) if isinstance(scale, str) else scale
    with gramian.observe(model, health, loss_reduction="sum", loss_scale=scale) as seen:
        loss = model(torch.randn(5, 3, dtype=torch.float64)).sum()
        (scale.scale(loss) if isinstance(scale, torch.amp.GradScaler) else scale * loss).backward()
    assert seen[health][""].gradient_norm == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_in_an_activation_is_counted_and_left_out(value: float) -> None:
    model, health = nn.Linear(4, 2, bias=False).double(), gramian.Health()
    x = torch.full((3, 4), 2.0, dtype=torch.float64)
    x[1, 2] = value
    with gramian.observe(model, health, loss_reduction="sum") as seen:
        model(x).sum().backward()
    assert seen[health][""].nonfinite == 1
    # The root mean square of the eleven finite numbers.
    assert seen[health][""].activation_norm == pytest.approx(2.0, rel=1e-12)
    assert seen[health][""].gradient_norm == pytest.approx(1.0, rel=1e-12)


def test_one_bad_number_in_a_gradient_is_counted_and_left_out() -> None:
    model, health = nn.Linear(4, 2, bias=False).double(), gramian.Health()
    coefficients = torch.ones(3, 2, dtype=torch.float64)
    coefficients[0, 0], coefficients[2, 1] = float("nan"), float("inf")
    with gramian.observe(model, health, loss_reduction="sum") as seen:
        (model(torch.ones(3, 4, dtype=torch.float64)) * coefficients).sum().backward()
    assert seen[health][""].nonfinite == 2
    assert seen[health][""].gradient_norm == pytest.approx(1.0, rel=1e-12)


def test_a_nan_spreads_and_every_layer_behind_it_shows_it() -> None:
    p = problem("mlp", 4)
    model, health = p.model(), gramian.Health()
    x, y = p.batch
    x = x.clone()
    x[2, 0] = float("nan")
    with gramian.observe(model, health, loss_reduction="sum") as seen:
        p.backward(model, (x, y), "sum")
    # One input; then all 9, 11 hidden units and the gradients of the sample's 9, 11 and 5 outputs.
    assert {layer: entry.nonfinite for layer, entry in seen[health].items()} == {"0": 1 + 9, "2": 9 + 11, "4": 11 + 5}


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_sizes_whose_square_leaves_float32_are_measured(size: float) -> None:
    model, health = nn.Linear(4, 2, bias=False), gramian.Health()
    with gramian.observe(model, health, loss_reduction="sum", audit=False) as seen:
        (model(torch.full((3, 4), size)) * size).sum().backward()
    assert seen[health][""].activation_norm == pytest.approx(size, rel=1e-6, abs=0)
    assert seen[health][""].gradient_norm == pytest.approx(size, rel=1e-6, abs=0)


def test_layers_that_mix_samples_are_welcome() -> None:
    model, health = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), gramian.Health()
    with gramian.observe(model, health) as seen:
        model(torch.randn(8, 4)).square().mean().backward()
    assert set(seen[health]) == {"0", "1", "2"}
    with (
        pytest.raises(gramian.GramianError, match="mixes the samples"),
        gramian.observe(model, health, gramian.NoiseScale()),
    ):
        model(torch.randn(8, 4))


class _SharedRow(nn.Module):
    """A linear sees a table of shape [1, T, D] that belongs to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 2, dtype=torch.float64)
        table = torch.ones(1, 5, 3, dtype=torch.float64)
        table[0, 4, 0] = float("nan")
        self.register_buffer("table", table)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.mix(self.table).nan_to_num() * x_BTD


@pytest.mark.parametrize("parts", [[4], [2, 2], [1, 3], [1, 1, 1, 1], [0, 4]])
def test_a_shared_row_counts_once_for_each_sample_however_they_are_split(parts: list[int]) -> None:
    # Every statistic is a sum over samples: a row that stands for B rows is B rows, with one bad number in each.
    model, health = _SharedRow(), gramian.Health()
    with gramian.observe(model, health, loss_reduction="sum", audit=False) as seen:
        for part in parts:
            model(torch.ones(part, 5, 2, dtype=torch.float64)).sum().backward()
    assert seen[health]["mix"].nonfinite == 4
    assert seen.sums(health)["mix"][2] in (
        4 * 5 * 3,
        4 * (5 * 3 - 1),
    )  # numbers behind the norm, with or without the bad ones
