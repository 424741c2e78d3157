"""Correlated noise on several processes: each makes that of its rows, and all of them that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist import private_bodies as bodies
from tests.dist.worlds import wrap
from tests.kit.processes import distributed
from tests.kit.refusals import refusal
from tests.statistics.problems import problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.dist, pytest.mark.xdist_group("processes")]

BANDED: dict[str, Any] = {"noise": "bandmf", "bands": 2, "releases": 6}
ROOTS: dict[str, Any] = {"noise": "bisr", "bands": 3}
FULL = pytest.mark.full


@pytest.mark.parametrize(
    "way, options",
    [
        ("fsdp2", BANDED),
        ("ddp", ROOTS),
        pytest.param("ddp", BANDED, marks=FULL),
        pytest.param("fsdp2", ROOTS, marks=FULL),
    ],
)
def test_training_ends_at_the_same_parameters_on_any_number_of_ranks(way: str, options: dict[str, Any]) -> None:
    bodies.compare_runs(way, "mlp", 2, "auto", 0.5, options)


@pytest.mark.parametrize(
    "way, options",
    [("fsdp2", BANDED), pytest.param("ddp", BANDED, marks=FULL), pytest.param("fsdp2", ROOTS, marks=FULL)],
)
def test_a_replay_makes_the_noise_of_the_first_run_bit_for_bit(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    bodies.compare_resumed(2, way, tmp_path, True, more=options)


@distributed(world_size=2)
def test_a_state_on_one_process_alone_or_of_another_is_refused_on_all(rank: int) -> None:
    p = problem("mlp", bodies.SAMPLES)
    options = {"noise_multiplier": 1.0, "poisson_sampling": True, "sample_rate": 0.5, "expected_batch": 6.0, **BANDED}
    private = bodies.make_private(p, wrap("fsdp2", p.model()), **options)
    bodies.go_on(private, 1)
    mine = private.engine.state_dict()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, {name: entry["rows"] for name, entry in mine["noise"].items()})
    model, engine = private.model, bodies.gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=bodies.SEED)
    private.engine.detach()
    if rank == 0:
        engine.load_state_dict(mine, replay=True)
    with refusal("state: its noise is not on every process"):
        bodies.make_private(p, model, engine=engine, **options)
    rows = states[1 - rank] if rank == 0 else states[rank]  # the first process has the file of the second
    noise = {name: {**entry, "rows": rows[name]} for name, entry in mine["noise"].items()}
    other = bodies.gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=bodies.SEED)
    other.load_state_dict({**mine, "noise": noise}, replay=True)
    with refusal("state: its noise is not on every process" if rank else "state: the noise of .* of another process"):
        bodies.make_private(p, model, engine=other, **options)
    assert torch.isfinite(next(model.parameters()).full_tensor()).all()
