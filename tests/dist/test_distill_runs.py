"""Distilled runs on several processes are the run on one: gradients, losses, the path of T, whoever holds the teacher."""

import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gramian.distill.distill_objective import REPORTED_SUMS
from gramian.distill.teaching import EXTRA_FIELDS
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.wrap_data_parallel import blocks_of
from gramian.train.build.run_parts import build
from gramian.train.config.config import parse_config
from gramian.train.loop.plain_stepper import PlainStepper
from tests.kit.matrix import FULL
from tests.kit.mutations import Edit
from tests.kit.processes import run_on_ranks
from tests.train.distilled import LEARNED, cache_of, student

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("processes")]

NAMES = ("nats", "flags", "tokens", "grad_norm", *EXTRA_FIELDS)
CPU = torch.device("cpu")
UNEVEN: dict[str, Any] = {"pack": False, "batch": 5, "micro_batch": 2}
"""Three processes have 1, 2 and 2 rows; two have 2 and 3, so that one ends with a row that does not count."""
HIDDEN: dict[str, Any] = {"features": "hidden", "feature_pairs": [[0, 0], [2, 1]], "feature_weight": 0.3}


def told_of(sections: dict[str, Any]) -> dict[str, Any]:
    """A config as plain dictionaries, for the other processes."""
    return tomllib.loads(student(**{"precision": {"kind": "fp64"}, **sections}).toml())


def steps_of(rank: int, size: int, told: dict[str, Any], steps: int, kind: str) -> dict[str, Any]:
    """So many optimizer steps: what each told, and at last the gradient of one more, whole."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        parts = build(parse_config(told), ProcessGrid(rank, size, CPU, kind))
        assert isinstance(parts.stepper, PlainStepper) and parts.teaching is not None
        batches, rows = iter(parts.batches_from(0, ())), []
        for step in range(steps):
            parts.teaching.begin(step)
            rows.append(parts.stepper.take(next(batches), 3e-3).values.tolist())
        parts.teaching.begin(steps)
        parts.stepper.watch(next(batches))
        slope = parts.teaching.temperature.gradient()
        if slope is not None:
            slope = parts.grid.sum_(slope.double()) / size
        gradients = {name.removeprefix("module."): _whole(p.grad) for name, p in parts.module.named_parameters()}
        sharded = [isinstance(p, DTensor) for p in parts.module.parameters()]
        teacher = getattr(parts.teaching.source, "sharded", False)
        units = all(isinstance(block, FSDPModule) for block in blocks_of(parts.model))
        parts.close()
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return {
        "rows": [dict(zip(NAMES, row, strict=True)) for row in rows],
        "slope": None if slope is None else float(slope),
        "gradients": gradients,
        "sharded": all(sharded),
        "teacher sharded": teacher,
        "blocks are units": units,
    }


def _whole(gradient: Tensor | None) -> list[float]:
    assert gradient is not None
    found = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found.flatten().tolist()


def far(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Largest differences: of what the steps told, of the last gradient relative to its norm, of dL/dT."""
    found = {
        name: max(
            abs(a[name] - b[name]) / max(1.0, abs(a[name]))
            for a, b in zip(one["rows"], other["rows"], strict=True)
            if a[name] == a[name]
        )
        for name in ("nats", "tokens", "grad_norm", *REPORTED_SUMS[1:], "temperature", "temperature_gradient")
    }
    assert one["gradients"].keys() == other["gradients"].keys()
    for name, expected in one["gradients"].items():
        a, b = torch.tensor(expected), torch.tensor(other["gradients"][name])
        found[name] = float((a - b).norm() / (a.norm() + 1e-12))
    if one["slope"] is not None:
        found["dL/dT"] = abs(one["slope"] - other["slope"]) / abs(one["slope"])
    return found


def same(processes: int, kind: str, sections: dict[str, Any], steps: int, tolerance: float) -> list[dict[str, Any]]:
    """Train on one process and on several, and compare."""
    told = told_of(sections)
    one = steps_of(0, 1, told, steps, "one")
    many = run_on_ranks(processes, steps_of, told, steps, kind)
    for found in many:
        wrong = {name: value for name, value in far(one, found).items() if not value <= tolerance}
        assert not wrong
        assert found["sharded"] == found["blocks are units"] == (kind == "fsdp2")
    return many


WORLDS = [(2, "ddp"), (2, "fsdp2"), (3, "ddp"), (3, "fsdp2")]
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "learnable": LEARNED,
    "adversarial": {"temperature_kind": "adversarial", "temperature_rate": 0.5, "temperature_free": 0.0},
    "learnable, with projectors": {**LEARNED, **HIDDEN},
    "reversed, cached": {**LEARNED, "direction": "reverse", "source": "hidden"},
    "top logits": {**LEARNED, "source": "topk"},
}
EACH = [(*world, kind) for world in WORLDS for kind in KINDS]
SAMPLED = [(2, "fsdp2", "learnable, with projectors")]


@pytest.mark.parametrize("processes, strategy, kind", EACH if FULL else SAMPLED)
def test_the_path_does_not_depend_on_the_processes(processes: int, strategy: str, kind: str) -> None:
    teacher = KINDS[kind]
    if "source" in teacher:
        teacher = {**teacher, "cache": str(cache_of(teacher["source"], pack=False))}
    same(processes, strategy, {"teacher": teacher, "data": UNEVEN}, 40 if FULL else 12, 1e-6)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_process_without_rows_changes_nothing(strategy: str) -> None:
    data = {"pack": False, "batch": 1, "micro_batch": 1}
    same(2, strategy, {"teacher": {**LEARNED, **HIDDEN}, "data": data}, 5, 1e-6)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_similarity_is_of_micro_batches_so_the_same_ones_give_the_same(strategy: str) -> None:
    """CKA is of all tokens of a micro-batch: four rows in twos are what two processes have."""
    teacher = {"features": "increments", "feature_pairs": [[0, 0], [1, 1], [2, 2]], "feature_weight": 0.3}
    same(2, strategy, {"teacher": teacher, "data": {"pack": False, "batch": 4, "micro_batch": 2}}, 5, 1e-6)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_sharded_teacher_says_what_the_whole_one_says(strategy: str) -> None:
    teacher = {**LEARNED, **HIDDEN, "strategy": "fsdp2"}
    many = same(2, strategy, {"teacher": teacher, "data": UNEVEN}, 5, 1e-6)
    assert all(found["teacher sharded"] for found in many)


def test_projectors_larger_than_the_student_are_sharded_beside_it() -> None:
    """The student's blocks are the units of FSDP2, however large the projectors are."""
    teacher = {**HIDDEN, "feature_pairs": [[0, 0], [1, 1]], "feature_from": 2}
    model = {"width": 2, "layers": 1, "heads": 1}
    many = same(2, "fsdp2", {"teacher": teacher, "model": model, "data": UNEVEN}, 4, 1e-6)
    assert max(row["feature_loss"] for row in many[0]["rows"][:2]) == 0 < many[0]["rows"][2]["feature_loss"]


@pytest.mark.full
@pytest.mark.parametrize("source", ["topk", pytest.param("hidden", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["learnable", pytest.param("fixed", marks=pytest.mark.full)])
def test_a_cache_on_two_processes_teaches_as_a_live_teacher_on_one(kind: str, source: str) -> None:
    """To 1e-3 of the loss for hidden states, 1e-2 for 64 logits and a curve."""
    steps = 100 if FULL else 20
    teacher = LEARNED if kind == "learnable" else {}
    told = {"teacher": teacher, "precision": {"kind": "fp32"}}
    live = steps_of(0, 1, told_of(told), steps, "one")["rows"]
    cached = {**told, "teacher": {**teacher, "source": source, "cache": str(cache_of(source))}}
    rows = run_on_ranks(2, steps_of, told_of(cached), steps, "ddp")[0]["rows"]
    tolerance = 1e-3 if source == "hidden" else 1e-2
    for a, b in zip(live, rows, strict=True):
        one, other = (row["temperature"] ** 2 * row["kl"] + 0.5 * row["ce"] for row in (a, b))
        assert other == pytest.approx(one, rel=tolerance)
        assert b["nats"] == pytest.approx(a["nats"], rel=tolerance)
        assert b["temperature"] == pytest.approx(a["temperature"], rel=tolerance)


BUGS = {
    "T by the gradient of its own process": (
        "gradient = self.grid.sum_(gradient.to(torch.float64))",
        "gradient = gradient",
    ),
    "T by the sum of gradients that are means": ("(scale * self.grid.size)", "scale"),
}


def spoiled_steps_of(rank: int, size: int, bug: str, told: dict[str, Any], steps: int, kind: str) -> dict[str, Any]:
    """The same with a bug."""
    with Edit("Teaching.finish", *BUGS[bug]).applied():
        return steps_of(rank, size, told, steps, kind)


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_temperature_that_processes_do_not_share_is_seen(bug: str) -> None:
    told = told_of({"teacher": LEARNED, "data": UNEVEN})
    one = steps_of(0, 1, told, 4, "one")
    for found in run_on_ranks(2, spoiled_steps_of, bug, told, 4, "ddp"):
        assert far(one, found)["temperature"] > 1e-4
