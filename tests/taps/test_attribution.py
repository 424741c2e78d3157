"""Ordinary models whose rows are proven and exact. Bugs in the taps that give a sample another one's rows are put in by
`tests/test_mutations.py`: entering the model must then raise, before a norm is used."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.oracles import single_sample
from gramian.taps.hub import hub_of
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.checks import assert_norms, captured, problem, wave

pytestmark = pytest.mark.oracle

SAMPLES = 4
NAMES = ("mlp", "linear_3d", "gpt", "tied_gpt", "conv2d", "reused", "rmsnorm", "mha", "windows", "pooled", "frames")


class Frames(nn.Module):
    """A convolution over the F images of each sample: [B, F, C, H, W] as F·B images, sample-major."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.image(x.flatten(0, 1))).mean((2, 3))
        return self.head(seen.unflatten(0, (x.shape[0], -1)).mean(1))


def _problem(name: str) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    if name != "frames":
        return problem(CASES[name], SAMPLES)
    torch.manual_seed(0)
    return Frames().double(), (torch.randn(SAMPLES, 3, 2, 4, 4, dtype=torch.float64),), wave


def _loop(model: nn.Module, batch: tuple[Any, ...], loss: Callable[..., Tensor], ids: Tensor) -> Tensor:
    """Norms of units, whose rows' gradients are summed, from single-sample backward passes: [U]."""
    gradients = single_sample.per_sample_gradients(deepcopy(model), partial(loss, reduction="sum"), batch)
    rows_BP = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    return rows_BP.new_zeros(int(ids.max()) + 1, rows_BP.shape[1]).index_add_(0, ids, rows_BP).norm(dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_an_ordinary_model_is_proven_and_exact(name: str) -> None:
    model, batch, loss = _problem(name)
    norms = captured(model, loss, batch, "sum", loss_reduction="sum")
    assert [found.units for found in hub_of(model).proof.proven.values()] == [SAMPLES]
    assert_norms(norms.values, _loop(model, batch, loss, torch.arange(SAMPLES)))


@pytest.mark.parametrize("name", ["linear_3d", "conv2d", "reused", "gpt", "mha"])
def test_units_of_several_rows_are_proven_and_exact(name: str) -> None:
    model, batch, loss = _problem(name)
    ids = torch.tensor([0, 2, 0, 1])
    norms = captured(model, loss, batch, "sum", loss_reduction="sum", sample_ids=ids)
    assert [found.units for found in hub_of(model).proof.proven.values()] == [3]
    assert_norms(norms.values, _loop(model, batch, loss, ids))


def test_an_output_whose_rows_several_units_share_is_refused() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 3, 3], [4, 4, 5, 5, 6]])
    model = Toy(lambda net, x: torch.tanh(net.layer(x)).mean(1), layer=nn.Linear(4, 3))
    with (
        refusal(r"^output 0 of the model has the shape \[3, 3\], whose first axes are not the tokens"),
        gramian.per_sample_norms(model, "sum", sample_ids=documents),
    ):
        model(torch.randn(3, 5, 4))
