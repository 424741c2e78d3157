"""What one process of a private model refuses is raised by all of them, by name, and nobody waits in a collective."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.dist import mesh_bodies as meshes
from tests.dist import private_bodies as bodies
from tests.dist.tp_bodies import mesh_of
from tests.dist.worlds import wrap
from tests.kit.processes import distributed
from tests.kit.refusals import refusal
from tests.statistics.problems import problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]


def refused_on(refused: int, rank: int, line: str) -> object:
    """Expect a line on process `refused`, and on the others the same behind its name."""
    return refusal(f"^{line}" if rank == refused else f"^process {refused}: {line}")


@pytest.mark.parametrize("way, refused", [("ddp", 1), ("fsdp2", 0), ("fsdp2", 1)])
@distributed(world_size=2)
def test_a_backward_that_one_process_refuses_is_refused_by_all_and_the_next_step_is_right(
    rank: int, way: str, refused: int
) -> None:
    p = problem("mlp", 6)
    private = bodies.make_private(p, wrap(way, p.model()), max_physical_batch=2)
    with refused_on(refused, rank, "max_physical_batch: is 2, and a backward has 3 samples"):
        private.backward(slice(0, 3) if rank == refused else slice(3, 5))
        private.optimizer.step()
    private.optimizer.zero_grad()
    private.backward(slice(2 * rank, 2 * rank + 2))
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p), slice(0, 4)))
    assert private.engine.steps == 1
    private.engine.detach()


@pytest.mark.parametrize("way, clipping", [("ddp", "auto"), ("fsdp2", "auto"), ("fsdp2", "two_pass")])
@distributed(world_size=2)
def test_what_the_end_of_a_backward_refuses(rank: int, way: str, clipping: str) -> None:
    p = problem("mlp", 6)
    private = bodies.make_private(p, wrap(way, p.model()), clipping=clipping)
    ids = torch.tensor([0, 1 - 2 * rank])  # a row of process 1 is of no unit, and has a gradient
    with refused_on(1, rank, "ids: rows or tokens of no unit"):
        with private.engine.units(ids):
            private.backward(slice(2 * rank, 2 * rank + 2), by_engine=True)
        private.optimizer.step()
    assert private.engine.steps == 0
    private.engine.detach()


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.few_proofs(every=1)
@distributed(world_size=2)
def test_samples_that_one_process_cannot_tell_apart(rank: int, way: str) -> None:
    model = wrap(way, meshes.Coupled())
    engine, optimizer, _ = meshes.private(model)
    with refused_on(1, rank, "down: .*when other samples are replaced"):
        model(torch.randn(1 + 2 * rank, 7)).square().mean().backward()
        optimizer.step()
    engine.detach()


@pytest.mark.few_proofs(every=1)
@distributed(world_size=4)
def test_replicas_of_a_sharded_model_too(rank: int) -> None:
    mesh, model = mesh_of(2, 2), meshes.Coupled()
    fully_shard(model.down, mesh=mesh)
    engine, optimizer, _ = meshes.private(fully_shard(model, mesh=mesh))
    with refused_on(3, rank, "down: .*when other samples are replaced"):
        model(torch.randn(3 if rank == 3 else 1, 7)).square().mean().backward()
        optimizer.step()
    engine.detach()
