"""Models whose curvature is planned and then run, and what a run of each holds beside what its plan said."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.curvature.blocks.block import Block
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.models import GPT, GPTConfig
from tests.curvature.small import Net

STORED: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp32": {"woodbury_dtype": "fp32"},
    "fp64 model": {"dtype": torch.float64},
}
SOME_STORED = ["fp16", pytest.param("fp32", marks=pytest.mark.full), "fp64 model"]


@dataclass(frozen=True)
class Case:
    """A model, what goes in, and how many classes come out."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.Tanh(), nn.Conv2d(24, 40, 3, stride=2, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(360, 11),
    )  # fmt: skip


class Tied(Net):
    """An embedding that is the head."""

    def __init__(self) -> None:
        super().__init__(tied=True, words=131, width=40)


class Twice(nn.Module):
    """A layer that is called twice, a weight that two layers use, and one table behind two lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(61, 24), nn.Embedding(61, 24)
        self.again, self.left, self.right = (nn.Linear(24, 24, bias=i == 0) for i in range(3))
        self.head = nn.Linear(24, 61, bias=False)
        self.other.weight, self.right.weight = self.table.weight, self.left.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.again(self.again(self.table(x_BT) * self.other(x_BT.flip(1))).tanh())
        return self.head(self.right(self.left(h).tanh()))


class Adapted(nn.Module):
    """HF's Conv1D, whose storage is transposed, frozen with an adapter beside it, and a layer whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base, self.head = nn.Embedding(61, 24), Conv1D(40, 24), nn.Linear(40, 61)
        self.down, self.up, self.turned = nn.Linear(24, 3, bias=False), nn.Linear(3, 40, bias=False), Conv1D(40, 40)
        for frozen in (self.base.weight, self.base.bias, self.head.bias):
            frozen.requires_grad_(False)

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.table(x_BT)
        return self.head(self.turned(self.base(h) + self.up(self.down(h))).tanh())


CASES: dict[str, Case] = {
    "gpt": Case(
        lambda: GPT(GPTConfig(vocabulary=151, context=12, layers=1, width=64, heads=2)),
        lambda: torch.randint(151, (6, 12)),
        151,
    ),
    "shared inputs": Case(lambda: Net(words=131, width=40), lambda: torch.randint(131, (5, 13)), 131),
    "tied": Case(Tied, lambda: torch.randint(131, (5, 13)), 131),
    "conv": Case(conv, lambda: torch.randn(3, 3, 9, 9), 11),
    "mlp": Case(
        lambda: nn.Sequential(
            nn.Linear(90, 70), nn.Tanh(), nn.Linear(70, 80, bias=False), nn.Tanh(), nn.Linear(80, 30)
        ),
        lambda: torch.randn(64, 90),
        30,
    ),
}


LARGER: dict[str, Case] = {
    "head": Case(
        lambda: GPT(GPTConfig(vocabulary=700, context=30, layers=1, width=80, heads=4)),
        lambda: torch.randint(700, (4, 30)),
        700,
    ),
    "many tokens": Case(
        lambda: GPT(GPTConfig(vocabulary=200, context=60, layers=1, width=64, heads=4)),
        lambda: torch.randint(200, (5, 60)),
        200,
    ),
    "wide": Case(
        lambda: nn.Sequential(nn.Linear(200, 400), nn.Tanh(), nn.Linear(400, 350, bias=False), nn.Linear(350, 120)),
        lambda: torch.randn(150, 200),
        120,
    ),
    "table and head": Case(lambda: Net(tied=True, words=500, width=120), lambda: torch.randint(500, (5, 20)), 500),
}
CASES.update(LARGER)


ODD: dict[str, Case] = {
    "twice": Case(Twice, lambda: torch.randint(61, (3, 7)), 61),
    "adapted": Case(Adapted, lambda: torch.randint(61, (3, 7)), 61),
    "one by one": Case(
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)), lambda: torch.randn(5, 1), 1
    ),
}


@dataclass
class Run:
    """A refresh, the plan made before it, and what its sums held when all tokens were in."""

    kfac: gramian.KFACNaturalGradient
    model: nn.Module
    plan: CurvaturePlan
    collected: int


def run(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    """Plan, then refresh on the data that the plan was made for."""
    case, dtype = {**CASES, **ODD}[name], options.pop("dtype", torch.float32)
    held: list[int] = []
    collected = KFACCapture.collected

    def counted(self: KFACCapture) -> Any:
        found = collected(self)
        held.append(sum(bytes_of(sums) for sums in found))
        return found

    monkeypatch.setattr(KFACCapture, "collected", counted)
    torch.manual_seed(0)
    model, inputs = case.build().to(dtype), case.inputs()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    kfac = gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-2, **options})
    plan = kfac.plan(model, inputs=inputs)
    refresh(kfac, model, inputs, case.classes)
    return Run(kfac, model, plan, held[0])


def refresh(kfac: gramian.KFACNaturalGradient, model: nn.Module, inputs: Tensor, classes: int) -> None:
    model.zero_grad()
    targets = torch.randint(classes, inputs.shape[:1] if inputs.is_floating_point() else inputs.shape)
    with kfac.capture(model, num_terms=targets.numel()):
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()


def bytes_of(sums: Any) -> int:
    """Every tensor that sums hold, each memory once."""
    parts = []
    for block in sums.values():
        if isinstance(block, Tensor):
            parts.append(block)
            continue
        parts += [block.counts_V] if block.counts_V is not None else []
        for moment in block.moments():
            parts += [t for t in (moment.matrix, moment.first_N, moment.diagonal_N) if t is not None]
            for chunk in moment.chunks:
                parts += [t for t in (chunk.rows_TN, chunk.weights_T, chunk.keys_T) if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parts}.values())


# ---- what ran agrees -------------------------------------------------------------------------------------------------


def assert_at_rest(run: Run) -> None:
    """Representation and bytes of every block, exactly."""
    assert [row.layer for row in run.plan.rows] == list(run.kfac.kfac_factors)
    for row in run.plan.rows:
        block = run.kfac.kfac_factors[row.layer]
        shared = bool(block.facts.shares_A_with)
        assert stored_as(block, "G") == row.G, row.layer
        assert ("" if block.A is None else "shared" if shared else stored_as(block, "A")) == row.A, row.layer
        held = block.G.nbytes + (0 if block.A is None or shared else block.A.nbytes)
        assert sum(row.bytes["rest"].values()) == held, row.layer
    assert run.plan.totals["cpu"].rest == run.kfac.record()["bytes"]


def stored_as(block: Block, side: str) -> str:
    factor = block.factors[side]
    return f"{factor.kind} {factor.rank:,}" if "low rank" in factor.kind else factor.kind
