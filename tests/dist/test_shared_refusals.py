"""What one process of a private model refuses is raised by all of them, by name, and nobody waits in a collective."""

import tempfile
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from gramian.core.errors import GramianError
from gramian.privacy.noise import secrets
from tests.dist import mesh_bodies as meshes
from tests.dist import private_bodies as bodies
from tests.dist.tp_bodies import mesh_of
from tests.dist.worlds import wrap
from tests.kit.processes import distributed
from tests.kit.refusals import refusal
from tests.statistics.problems import problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]


def refused_on(refused: int, rank: int, line: str) -> AbstractContextManager[object]:
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
@distributed(world_size=2)
def test_a_step_that_one_process_refuses_before_a_forward_or_after_its_backward(rank: int, way: str) -> None:
    p = problem("mlp", 4)
    private = bodies.make_private(p, wrap(way, p.model()))
    groups = private.optimizer.param_groups
    for early in (True, False):
        if rank == 1:
            groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(3))]})
        with refused_on(1, rank, "optimizer: its trained parameters"):
            if rank == 0 or not early:
                private.backward(slice(2 * rank, 2 * rank + 2))
            private.optimizer.step()
        del groups[1:]
        private.optimizer.zero_grad()
    private.backward(slice(2 * rank, 2 * rank + 2))
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@distributed(world_size=2)
def test_processes_at_different_places_are_refused_by_all(rank: int) -> None:
    """One forgets the forward of a batch, in which the other waits for its weights."""
    p = problem("mlp", 4)
    private = bodies.make_private(p, wrap("fsdp2", p.model()))
    with refusal("^step: processes are 1 at a forward and 1 at an optimizer step; expected as many forwards"):
        if rank == 0:
            private.backward(slice(0, 2))
        private.optimizer.step()
    private.backward(slice(2 * rank, 2 * rank + 2))
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@distributed(world_size=2)
def test_a_release_that_the_first_process_cannot_count_is_begun_by_none(rank: int, way: str) -> None:
    """All would go on with another number, and another noise, than the first."""
    p = problem("mlp", 4)
    private = bodies.make_private(p, wrap(way, p.model()), noise_multiplier=1.0)
    with tempfile.TemporaryDirectory() as folder:
        private.engine.bind_counter(f"{folder}/counter")
        private.backward(slice(2 * rank, 2 * rank + 2))
        full = mock.patch.object(secrets, "_write_mark", side_effect=GramianError("counter: no space"))
        with full, refused_on(0, rank, "counter: no space"):
            private.optimizer.step()
        assert private.engine.steps == 0
        private.optimizer.step()
        assert private.engine.steps == 1
        bodies.assert_ranks_hold_the_same(bodies.parameters_of(private.model))
        private.engine.detach()


@pytest.mark.parametrize("how", ["changed", "twice", "single"])
@distributed(world_size=2)
def test_what_one_process_refuses_inside_of_a_backward(rank: int, how: str) -> None:
    p, rows = problem("mlp", 4), slice(rank, rank + 1)
    private = bodies.make_private(p, wrap("ddp", p.model()), max_physical_batch=1 if how == "single" else None)
    line = "0.weight: was changed between backward" if how == "changed" else "backward: ran twice through one forward"
    with refused_on(1, rank, line):
        loss = p.case.loss(private.model, *p.rows(rows), reduction="mean")
        loss.backward(retain_graph=True)
        if rank == 1:
            next(iter(private.model.parameters())).data.add_(how == "changed")
            private.backward(rows) if how == "changed" else loss.backward()
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
