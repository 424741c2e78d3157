"""Uses of a Fisher that several processes hold together: what one process with all samples has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import gramian
from gramian.curvature import EWCPenalty, Laplace, fisher_average, fisher_overlap, influence_scores, subspace_overlap
from gramian.taps.model.user_names import unwrap
from tests.curvature.problems import assert_close
from tests.curvature.splits import CASES, refresh, vector
from tests.dist.kfac_bodies import make, wrapped
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.full, pytest.mark.xdist_group("processes")]
SPLIT = [[0, 2, 4], [1, 3]]
SAMPLES = 5


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def move(model: nn.Module) -> None:
    """Another θ, the same on all processes and however it is sharded."""
    root = unwrap(model)
    steps = vector(CASES["words"].model())
    with torch.no_grad():
        for name, p in root.named_parameters():
            step = 0.1 * steps[name]
            p += distribute_tensor(step, p.device_mesh, p.placements) if isinstance(p, DTensor) else step


def used(model: nn.Module, fishers: list[gramian.KFACNaturalGradient], rows: list[int]) -> dict[str, Any]:
    """What every use gives; scores are those of this process's samples."""
    root = unwrap(model)
    posterior = Laplace(fishers[0], root, n=30.0, prior_precision=0.5)
    inputs, targets = CASES["words"].data(SAMPLES)
    query = vector(CASES["words"].model())
    found: dict[str, Any] = {
        "overlap": torch.tensor(fisher_overlap(*fishers).model),
        "subspace": torch.tensor(subspace_overlap(*fishers, 2).model),
        "log marginal": torch.tensor(posterior.log_marginal(-3.0).total),
    }
    found |= {f"draw {n}": t for n, t in posterior.sample(torch.Generator().manual_seed(1)).items()}
    places = dict(root.named_parameters())
    sharded = {
        n: distribute_tensor(t, places[n].device_mesh, places[n].placements) if isinstance(places[n], DTensor) else t
        for n, t in query.items()
    }
    with influence_scores(fishers[0], model, sharded, loss_reduction="sum") as scores:
        F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum").backward()
    found["scores"] = scores.values
    penalty = EWCPenalty()
    penalty.add_task(fishers[0], root, 2.0)
    move(model)
    root.zero_grad()
    value = penalty(root)
    value.backward()
    found["penalty"] = value.detach()
    found |= {f"gradient {n}": whole(p.grad) for n, p in root.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("reduce", ["gram", "dense"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@distributed(world_size=2)
def test_uses_are_those_of_one_process(rank: int, way: str, reduce: str) -> None:
    case = CASES["words"]
    alone, model = case.model(), wrapped(way, case.model())
    ours, theirs = [], []
    for number in (SAMPLES, SAMPLES + 1):  # two tasks
        one = make(kfac_distributed_reduce="none")
        refresh(one, alone, case.data(number), range(SAMPLES), reduction="sum")
        theirs.append(one)
        together = make(kfac_distributed_reduce=reduce)
        refresh(together, model, case.data(number), SPLIT[rank], reduction="sum")
        ours.append(together)
    expected = used(alone, theirs, list(range(SAMPLES)))
    expected["scores"] = expected["scores"][SPLIT[rank]]
    found = used(model, ours, SPLIT[rank])
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert_close(found[name], want, 1e-9, name)


@distributed(world_size=2)
def test_an_average_of_sharded_models_is_that_of_whole_ones(rank: int) -> None:
    case = CASES["words"]
    results = []
    for way, reduce, rows in (("plain", "none", list(range(SAMPLES))), ("fsdp2", "gram", SPLIT[rank])):
        models = [wrapped(way, case.model()) for _ in range(2)]
        move(models[1])
        fishers = []
        for model, number in zip(models, (SAMPLES, SAMPLES + 1), strict=True):
            fisher = make(kfac_distributed_reduce=reduce)
            refresh(fisher, model, case.data(number), rows, reduction="sum")
            fishers.append(fisher)
        got = fisher_average(models, fishers, damping=0.01, tolerance=1e-12)
        results.append({name: whole(t) for name, t in got.parameters.items()})
    for name, want in results[0].items():
        assert_close(results[1][name], want, 1e-9, name)
