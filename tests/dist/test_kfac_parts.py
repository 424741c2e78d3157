"""K-FAC of parameters that are several matrices on gloo processes, replicated and sharded: as on one."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.curvature.splits import Case
from tests.curvature.test_mixers import Mixer
from tests.dist import kfac_bodies as bodies
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.full, pytest.mark.xdist_group("processes")]


class Experts(nn.Module):
    """Three matrices; a token goes to one of them, and few to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        chosen = (rows[:, 0] > 0.2).long() + (rows[:, 1] > 0.8)
        for e in range(3):
            here = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, here, F.linear(rows[here], self.weight[e]).tanh())
        return out.view_as(x)


class Mixture(nn.Module):
    """Attention, experts, a convolution with groups, one by channel, and two tables that are no product."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.MultiheadAttention(12, 2, batch_first=True), Experts()
        self.groups, self.channels = (
            nn.Conv1d(12, 24, 11, padding=5, groups=2),
            nn.Conv1d(24, 24, 7, padding=3, groups=24),
        )
        self.gates, self.head = nn.Parameter(torch.randn(12, 12)), nn.Linear(24, 5)
        self.positions = nn.Parameter(torch.randn(1, 4, 36))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[..., :12].tanh()
        x = x + self.attention(x, x, x, need_weights=False)[0] * self.gates.sum(0)
        return self.head(self.channels(self.groups(self.experts(x).mT)).mT.tanh())


def inputs(n: int) -> Tensor:
    return torch.randn(n, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


CASE = Case(Mixture, inputs, 5, 4)


@pytest.mark.parametrize("way", ["ddp", "fsdp2 root"])
@distributed(world_size=2)
def test_two_processes_have_the_blocks_of_one(rank: int, way: str) -> None:
    record = bodies.same_as_one(
        rank, way, CASE, [[3, 0], [4, 1, 2]], {"damping": 0.01}, reduction="sum", tolerance=1e-9
    )
    assert record["layers"]["experts.weight[2]"]["approximation"] == "K-FAC experts.weight[2]"
    assert record["layers"]["channels.weight"]["approximation"] == "exact blocks of rows"
    assert record["layers"]["gates"]["why_not_kfac"]
    assert record["layers"]["positions"]["approximation"] == "K-FAC of the rows of positions"


class Mixing(nn.Module):
    """A mixer that uses weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.head = Mixer(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixer(x))


@distributed(world_size=2)
def test_two_processes_find_the_layers_that_are_tapped_as_one(rank: int) -> None:
    case = Case(Mixing, inputs, 5, 4)
    record = bodies.same_as_one(
        rank, "ddp", case, [[3, 0], [4, 1, 2]], {"damping": 0.01}, reduction="sum", tolerance=1e-9
    )
    assert record["layers"]["mixer.step.weight"]["approximation"] == "K-FAC mixer.step.weight"
