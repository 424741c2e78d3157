"""Without one sample the private sum moves by at most C, and by that sample's own clipped gradient: every model of the table.

The sum is `p.grad` after a backward under `make_private` without noise; the gradient that must be missing comes from a loop of
single-sample backward passes in float64.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.privacy.problems import Run, private
from tests.statistics.problems import Problem, problem

pytestmark = pytest.mark.oracle

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
LARGEST = 33
"""Batches have 2 to 33 samples: both sides of every power of two, at which the proof takes another run."""
ROUNDING = {False: 2.0**-40, True: 2.0**-18}
"""Relative, of the difference of two sums; True: of a model that computes in float32 inside."""


def _sizes(name: str, storage: str) -> Sequence[int]:
    """Both ends and one between, another one in every cell; in the whole run all of "auto", and each fourth of the others."""
    turn = list(CASES).index(name) * 7 + STORAGES.index(storage) * 11
    if FULL:
        return range(2, LARGEST + 1, 1 if storage == "auto" else 4)
    return 2, 3 + turn % (LARGEST - 3), LARGEST


def _clipped(p: Problem, sample: int, limit: float) -> Tensor:
    """The gradient of one sample, of norm C at most, as one vector; from the loop."""
    g = torch.cat([gradient[sample].flatten() for gradient in p.gradients.values()])
    aimed = limit / (1 + SLACK[torch.float32 if p.case.computes_in_float32 else torch.float64])
    return g * min(1.0, aimed / float(g.norm()))


def _summed(run: Run, loss: Callable[..., Tensor], batch: tuple[Tensor, ...], two_pass: bool) -> Tensor:
    """What a backward over a batch adds to the gradients, as one vector."""
    run.optimizer.zero_grad()
    value = loss(run.model, *batch, reduction="mean")
    run.engine.backward(value) if two_pass else value.backward()
    return torch.cat([g.flatten() for g in run.gradients().values()])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
def test_without_one_sample_the_sum_moves_by_its_clipped_gradient_and_at_most_by_C(name: str, storage: str) -> None:
    p = problem(name, LARGEST)
    norms = p.norms()
    limit, rounding = 0.7 * float(norms[:2].max()), ROUNDING[p.case.computes_in_float32]
    with private(p.model(), limit, clipping=storage, batch_size=LARGEST) as run:
        for size in _sizes(name, storage):
            removed = int(norms[:size].argmax())  # which is clipped
            rest = [i for i in range(size) if i != removed]
            whole = _summed(run, p.case.loss, p.rows(slice(0, size)), storage == "two_pass")
            without = _summed(run, p.case.loss, p.rows(rest), storage == "two_pass")
            moved, allowed = whole - without, rounding * float(whole.norm() + without.norm() + limit)
            assert float(moved.norm()) <= limit + allowed, f"{size} samples without {removed}"
            assert float((moved - _clipped(p, removed, limit)).norm()) <= allowed, f"{size} samples without {removed}"
        assert run.engine.proof["rows"] == "proven"


class Sorted(nn.Module):
    """Samples are sorted by length, encoded and put back: rows of the encoder are those of other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(torch.tanh(self.encoder(x[order]))[order.argsort()])


@pytest.mark.parametrize("size", [8, LARGEST])
def test_the_bound_breaks_on_rows_of_other_samples_and_the_proof_refuses_them(size: int) -> None:
    """What is measured above can exceed C, and does where the proof is switched off."""
    torch.manual_seed(0)
    model, x, limit = Sorted().double(), torch.randn(size, 4, dtype=torch.float64), 1e-2
    x[:, 1:] *= 10 ** torch.linspace(-2, 2, size, dtype=torch.float64)[:, None]

    def loss(model: nn.Module, x: Tensor, reduction: str) -> Tensor:
        return model(x).square().sum(1).mean()

    with private(model, limit, batch_size=size, proof="off") as run:
        whole = _summed(run, loss, (x,), two_pass=False)
        rest = [_summed(run, loss, (torch.cat([x[:i], x[i + 1 :]]),), two_pass=False) for i in range(size)]
    assert max(float((whole - without).norm()) for without in rest) > 1.5 * limit
    with private(model, limit, batch_size=size) as run, refusal(r"^encoder: the input of sample"):
        _summed(run, loss, (x,), two_pass=False)
