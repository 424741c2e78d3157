"""The metric of public factors on gloo processes: 1 = 2 = 3 processes, noise included, under DDP and FSDP2."""

import pytest
import torch

import gramian
from tests.dist import private_bodies as bodies
from tests.dist.worlds import wrap
from tests.kit.matrix import FULL
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.privacy.test_metric import public_factors
from tests.statistics.problems import assert_tensors, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]
CELLS = [("ddp", "tied_gpt", 2), ("fsdp2", "gpt", 2), ("fsdp2", "mlp", 3)]


def run(rank: int, world_size: int, way: str, name: str) -> dict[str, torch.Tensor]:
    p = problem(name, bodies.SAMPLES)
    kfac = public_factors(p, p.model())
    return bodies.noisy_run(rank, world_size, way, name, 2, "auto", bodies.RATE, {"metric": kfac})[0]


@pytest.mark.parametrize("way, name, world_size", CELLS if FULL else CELLS[1:2])
def test_private_steps_in_a_metric_are_those_of_one_process(way: str, name: str, world_size: int) -> None:
    alone = run(0, 1, "one", name)
    for ended in run_on_ranks(world_size, run, way, name):
        assert_tensors(ended, alone, 1e-8)
    plain = bodies.noisy_run(0, 1, "one", name, 2, "auto", bodies.RATE, {})[0]
    assert any(float((plain[n] - alone[n]).norm()) > 1e-3 * float(plain[n].norm()) for n in alone)


@distributed(world_size=2)
def test_factors_that_differ_between_processes_are_refused_before_anything_is_released(rank: int) -> None:
    p = problem("mlp", 6)
    kfac = gramian.KFACNaturalGradient(damping=0.1 + 0.1 * rank, kfac_distributed_reduce="none")
    model = p.model()
    with kfac.capture(model, loss_reduction="sum", num_terms=6):
        p.case.loss(model, *p.batch, reduction="sum").backward()
    kfac.public = True
    private = bodies.make_private(p, wrap("ddp", p.model()), metric=kfac)
    private.backward(slice(0, 3))
    with refusal(r"^metric: its factors differ between processes"):
        private.optimizer.step()
    assert private.engine.steps == 0
    private.engine.detach()
