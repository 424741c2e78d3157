"""`[kfac]` on several processes is the run on one: uneven and empty ranks, micro-batches, subsets, rollback, resume."""

import contextlib
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import parse_config
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.evaluate import evaluate
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.loop.trainer import Trainer
from gramian.train.state.run_folder import RunFolder, read_lines
from gramian.verify.resume import differences
from tests.kit.matrix import FULL
from tests.kit.mutations import Edit
from tests.kit.processes import run_on_ranks
from tests.train.runs import PRIVATE, small

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("processes")]

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "precision": {"kind": "fp64"},
    "model": {"layers": 1, "width": 16, "heads": 2},
    "data": {"pack": False, "length": 16, "batch": 5, "micro_batch": 2},
    "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "schedule": {"warmup": 2},
    "eval": {"every": 100, "windows": 4},
    "checkpoint": {"snapshot_every": 3, "every": 3},
    "kfac": {"update_freq": 4, "ema_decay": 0.5, "kl_clip": 1e-2},
}
"""Two processes have 2 and 3 rows, one of them ends with a row that does not count; three have 1, 2 and 2. Of 80 tokens A and G
are of low rank and of full rank."""
SUBSET: dict[str, Any] = {"kfac": {"max_tokens": 24}}


class Stopped(Exception):
    """A run that was ended from outside, on all processes."""


def told_of(folder: Path, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A config as plain dictionaries, for the other processes."""
    told = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}}
    told["run"] = {"steps": steps, **told.get("run", {})}
    return tomllib.loads(small(folder, **told).toml())


def run_of(
    rank: int, size: int, told: dict[str, Any], kind: str, stop: int | None = None, fault: int | None = None
) -> dict[str, Any]:
    """A run of the loop.

    Args:
        rank: of this process.
        size: of the world.
        told: its config.
        kind: "one", "ddp" or "fsdp2".
        stop: the step after which it is left as if it had crashed.
        fault: data position at which the last process computes what is not finite, once.

    Returns:
        Its record of K-FAC, on every process.
    """
    config, world = parse_config(told), ProcessGrid(rank, size, CPU, kind)
    deterministic = torch.are_deterministic_algorithms_enabled()
    folder = RunFolder(config)
    if rank == 0:
        folder.__enter__()
    world.most(0.0)  # nobody looks into it before
    try:
        parts = build(config, world)
        if fault is not None and rank == size - 1:
            spoil(parts, fault)

        def stopping(outcome: StepOutcome, trainer: Trainer) -> None:
            if outcome.attempt.step == stop:
                raise Stopped

        with contextlib.suppress(Stopped):
            Trainer(parts, folder, stopping).run()
        assert parts.stepper.kfac is not None
        return parts.stepper.kfac.record()
    finally:
        folder.__exit__(None, None, None)
        torch.use_deterministic_algorithms(deterministic)


def spoil(parts: Parts, position: int) -> None:
    """Make the forward of one batch not finite."""
    take, bad = parts.stepper.take, [False, True]

    def spoiled(batch: Any, *told: Any) -> Any:
        bad[0] = bad[1] and batch.position == position
        bad[1] = bad[1] and not bad[0]
        return take(batch, *told)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * torch.nan if bad[0] else None

    parts.stepper.take = spoiled  # type: ignore[method-assign]
    parts.model.register_forward_hook(hook)


def curve(folder: Path) -> list[float]:
    """The loss of every step; a file holds none where it is not finite."""
    found = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    return [math.nan if loss is None else loss for loss in found]


def far(one: Path, other: Path) -> float:
    """The largest difference of two loss curves."""
    left, right = curve(one), curve(other)
    assert len(left) == len(right) > 0
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def runs(
    tmp_path: Path, processes: int, kind: str, steps: int, body: Callable[..., Any] = run_of, **sections: Any
) -> tuple[float, list[dict[str, Any]]]:
    """Train on one process and on several: how far the losses are apart, and what K-FAC says of the second run."""
    run_of(0, 1, told_of(tmp_path / "one", steps, **sections), "one")
    told = told_of(tmp_path / "many", steps, **sections)
    records = run_on_ranks(processes, body, told, kind)
    assert curve(tmp_path / "one")[-1] < curve(tmp_path / "one")[0]
    return far(tmp_path / "one", tmp_path / "many"), records


def reductions(record: dict[str, Any]) -> set[str]:
    return {side["reduction"] for layer in record["layers"].values() for side in layer["sides"].values()}


# ---- the same run ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "gram": SUBSET,
    "gather": {"kfac": {"kfac_distributed_reduce": "gather", "kfac_true_fisher_head": True}},
    "dense": {"kfac": {"kfac_distributed_reduce": "dense"}, "model": {"tied": True}},
    "gram, joint, all tokens": {"kfac": {"damping_mode": "joint", "kfac_true_fisher_head": True}},
    "gram, budget": {"kfac": {"memory_budget": "400KB"}},
    "gram, the optimizer kfac": {
        "optimizer": {"kind": "kfac", "lr": 1e-3},
        "kfac": {"kl_clip": None, "max_tokens": 24},
    },
    "gram, AdamW, clipped": {"optimizer": {"kind": "adamw", "lr": 1e-3, "max_norm": 0.1}},
}
WORLDS = [(2, "ddp"), (2, "fsdp2"), (3, "ddp"), (3, "fsdp2")]
EACH = [(*world, options) for world in WORLDS for options in OPTIONS]


@pytest.mark.parametrize("processes, kind, options", EACH if FULL else [(2, "fsdp2", "gram"), (2, "ddp", "gather")])
def test_the_loss_curve_does_not_depend_on_the_processes(
    processes: int, kind: str, options: str, tmp_path: Path
) -> None:
    found, records = runs(tmp_path, processes, kind, 24 if FULL else 6, **OPTIONS[options])
    assert found < 1e-6
    for record in records:
        assert record["world_size"] == processes
        assert options.split(",")[0] in reductions(record)
        assert record["refreshes"] == -(-record["steps"] // 4) and not record["dropped"]


LONG: dict[str, dict[str, Any]] = {"kfac": {"kl_clip": 1e-3}, "checkpoint": {"snapshot_every": 50, "every": 100}}
"""The default trust region. With one ten times as wide such a run is chaotic: on one process, two layers of width 32 whose
weights begin 4 units in the last place elsewhere end 200 steps later 1e-2 apart, and 2e-14 apart with this one."""


@pytest.fixture(scope="module")
def two_hundred_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "one"
    run_of(0, 1, told_of(folder, 200, **LONG), "one")
    return folder


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("processes, kind", [(2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2")])
def test_two_hundred_steps_do_not_depend_on_the_processes(
    processes: int, kind: str, two_hundred_steps: Path, tmp_path: Path
) -> None:
    run_on_ranks(processes, run_of, told_of(tmp_path / "many", 200, **LONG), kind)
    found = far(two_hundred_steps, tmp_path / "many")
    print(f"{processes} processes, {kind}: the losses of 200 steps differ by at most {found:.2g}")
    assert found < 1e-6
    assert curve(two_hundred_steps)[-1] < 4 < curve(two_hundred_steps)[0]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_process_without_rows_changes_nothing(kind: str, tmp_path: Path) -> None:
    found, _ = runs(tmp_path, 2, kind, 6, data={"batch": 1, "micro_batch": 0})
    assert found < 1e-6


def built(rank: int, size: int, told: dict[str, Any], kind: str) -> str:
    """What building says."""
    try:
        build(parse_config(told), ProcessGrid(rank, size, CPU, kind))
    except GramianError as problem:
        return str(problem)
    return ""


def test_fused_sgd_of_shards_is_refused_by_name(tmp_path: Path) -> None:
    told = told_of(tmp_path / "run", 4, optimizer={"implementation": "fused"})
    assert all(said.startswith("optimizer.implementation: ") for said in run_on_ranks(2, built, told, "fsdp2"))


# ---- rollback and resume -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_fault_of_one_process_is_rolled_back_by_all(kind: str, tmp_path: Path) -> None:
    """At a step that refreshes: the refresh is dropped, factors go back with the weights, and the curve is that of one."""
    fault = 8
    run_of(0, 1, told_of(tmp_path / "one", 14), "one", None, fault)
    records = run_on_ranks(2, run_of, told_of(tmp_path / "many", 14), kind, None, fault)
    told = [read_lines(tmp_path / name / "events.jsonl") for name in ("one", "many")]
    one, many = ([event for event in events if event["event"] == "rollback"] for events in told)
    assert len(one) == len(many) == 1
    assert {key: (one[0][key], many[0][key]) for key in ("from", "to", "skipped")} == {
        "from": (9, 9),
        "to": (6, 6),
        "skipped": ([7, 8], [7, 8]),
    }
    left, right = curve(tmp_path / "one"), curve(tmp_path / "many")
    assert len(left) == len(right) > 12 and math.isnan(left[fault]) and math.isnan(right[fault])
    assert max(abs(a - b) for a, b in zip(left, right, strict=True) if not math.isnan(a)) < 1e-6
    assert all(record["refreshes"] >= 3 for record in records)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_run_that_was_left_goes_on_bitwise_on_as_many_and_alike_on_others(kind: str, tmp_path: Path) -> None:
    whole = told_of(tmp_path / "whole", 9, **SUBSET)
    run_on_ranks(2, run_of, whole, kind)
    for name, processes in {"same": 2, "fewer": 1, **({"more": 3} if FULL else {})}.items():
        told = told_of(tmp_path / name, 9, **SUBSET)
        run_on_ranks(2, run_of, told, kind, 6)
        assert len(curve(tmp_path / name)) < 9
        if processes == 1:
            run_of(0, 1, told, "one")
        else:
            run_on_ranks(processes, run_of, told, kind)
        assert far(tmp_path / "whole", tmp_path / name) < 1e-6
    assert differences(tmp_path / "whole", tmp_path / "same") == []


# ---- beside [privacy] --------------------------------------------------------------------------------------------------

PUBLIC: dict[str, dict[str, Any]] = {
    "privacy": PRIVATE,
    "kfac": {"max_tokens": 24, "ema_decay": 0.0, "public_files": [str(Path(__file__))]},
}


def public_curvature(rank: int, size: int, told: dict[str, Any], kind: str, evaluated: bool) -> dict[str, Tensor]:
    """F v on public data, after weights that the copy does not have yet."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        parts = build(parse_config(told), ProcessGrid(rank, size, CPU, kind))
        assert isinstance(parts.stepper, PrivateStepper) and parts.stepper.curvature is not None
        with torch.no_grad():
            for p in parts.module.parameters():
                p.mul_(1.5)
        if evaluated:
            evaluate(parts, 4)
        parts.stepper.curvature.refresh(1)
        kfac = parts.stepper.curvature.kfac
        shapes = {n: p.shape for n, p in parts.stepper.curvature.copy.named_parameters()}
        draw = torch.Generator().manual_seed(0)
        vector = {n: torch.randn(shape, dtype=torch.float64, generator=draw) for n, shape in shapes.items()}
        parts.close()
        return kfac.compute_fisher_vector_product(vector)
    finally:
        torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_public_curvature_of_a_private_run_does_not_depend_on_the_processes(kind: str, tmp_path: Path) -> None:
    told = told_of(tmp_path / "run", 4, **PUBLIC)
    expected = public_curvature(0, 1, told, "one", False)
    for found in run_on_ranks(2, public_curvature, told, kind, True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-10 * value.norm(), name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_private_run_with_public_curvature_goes_on_bitwise(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, run_of, told_of(tmp_path / "whole", 9, **PUBLIC), kind)
    told = told_of(tmp_path / "same", 9, **PUBLIC)
    run_on_ranks(2, run_of, told, kind, 6)
    run_on_ranks(2, run_of, told, kind)
    assert differences(tmp_path / "whole", tmp_path / "same") == []


# ---- bugs --------------------------------------------------------------------------------------------------------------

BUGS = {
    "a coefficient that forgets the processes": (
        Edit("PlainStepper._observed", "loss_reduction=coefficient", "loss_reduction=coefficient / self.grid.size"),
        {},
    ),
    "ids of this process's own": (
        Edit("stepper:terms_and_ids", "batch.first + sum(sizes[:i])", "sum(sizes[:i])"),
        SUBSET,
    ),
    "ids as a sampler would deal them out": (
        Edit("stepper:terms_and_ids", "torch.arange(first, first + sizes[i])", "None"),
        SUBSET,
    ),
    "terms of the whole step": (
        Edit("stepper:terms_and_ids", "int((targets_BT != IGNORED).sum())", "batch.tokens"),
        {},
    ),
}


def spoiled_run_of(rank: int, size: int, bug: str, told: dict[str, Any], kind: str) -> dict[str, Any]:
    """The same with a bug."""
    with BUGS[bug][0].applied():
        return run_of(rank, size, told, kind)


@pytest.mark.parametrize("bug", BUGS if FULL else list(BUGS)[:2])
def test_a_bug_is_seen(bug: str, tmp_path: Path) -> None:
    sections = BUGS[bug][1]
    run_of(0, 1, told_of(tmp_path / "one", 4, **sections), "one")
    run_on_ranks(2, spoiled_run_of, bug, told_of(tmp_path / "many", 4, **sections), "ddp")
    assert far(tmp_path / "one", tmp_path / "many") > 1e-5


def whole_after_a_resume(rank: int, size: int, told: dict[str, Any], kind: str) -> dict[str, Any]:
    """Factors that are read are not spread again."""
    with Edit("Stepper.load_sections", ", self.captured)", ")").applied():
        return run_of(rank, size, told, kind)


@pytest.mark.full
def test_factors_that_are_not_spread_again_after_a_resume_are_seen(tmp_path: Path) -> None:
    run_on_ranks(2, run_of, told_of(tmp_path / "whole", 12), "ddp")
    told = told_of(tmp_path / "same", 12)
    run_on_ranks(2, run_of, told, "ddp", 7)
    run_on_ranks(2, whole_after_a_resume, told, "ddp")
    assert differences(tmp_path / "whole", tmp_path / "same") != []
