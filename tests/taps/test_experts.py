"""Experts written by hand: tokens are sorted by expert in the layer's own code, and some experts have none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from tests.kit.refusals import refusal
from tests.taps.test_batch_free import assert_norms_of, assert_private_sums_of

pytestmark = pytest.mark.oracle
B, D, E = 4, 6, 4


class Experts(nn.Module):
    """Two of E experts for each token, added up; every expert is called, also with no token."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        self.router, self.leak = nn.Linear(D, E), leak

    def expert(self, number: int, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1) + self.leak * x.mean((0, 1))
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        y = torch.zeros_like(rows)
        for number in range(E):
            token, place = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.expert(number, rows[token]) * weights[token, place, None])
        return y.view_as(x)


class Stacked(Experts):
    """Weights of all experts in one tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = nn.Parameter(torch.randn(E, 9, D)), nn.Parameter(torch.randn(E, D, 9))

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(rows, self.up[number])), self.down[number])


class Listed(Experts):
    """A module for each expert."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, D)) for _ in range(E))

    def expert(self, number: int, rows: Tensor) -> Tensor:
        found: Tensor = self.experts[number](rows)
        return found


def network(kind: type[Experts], seed: int, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(D, D), kind(**options), nn.Linear(D, 3)).double()
    return model, torch.randn(B, 1 + seed % 3, D, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [Stacked, Listed])
def test_norms_are_those_of_the_loop_where_experts_have_no_or_few_tokens(kind: type[Experts], seed: int) -> None:
    assert_norms_of(*network(kind, seed))


@pytest.mark.parametrize("kind", [Stacked, Listed])
def test_private_sums_are_those_of_the_loop(kind: type[Experts]) -> None:
    assert_private_sums_of(*network(kind, 1))


@pytest.mark.parametrize("kind", [Stacked, Listed])
def test_a_coupling_of_many_roundings_is_refused(kind: type[Experts]) -> None:
    model, x = network(kind, 1, leak=1e-11)
    with refusal(r"when other samples are replaced|saw \d+ rows for a batch"), gramian.per_sample_norms(model):
        model(x)
