"""`gramian curvature` on several processes: the numbers of one process, and the first one alone prints and writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.analysis import Settings, analyse
from gramian.analysis.subject import from_config
from gramian.cli import main
from gramian.parallel.process_grid import DataParallelKind, ProcessGrid
from tests.analysis.subjects import tiny
from tests.cli.torchrun import on_processes
from tests.kit.matrix import FULL
from tests.kit.processes import run_on_ranks
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.runs import small

SHAPE: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "width": 8, "heads": 1},
    "data": {"length": 8, "limit_bytes": 100_000},
}
CELLS: list[tuple[int, tuple[int, ...] | None, dict[str, Any]]] = [
    (2, (3, 2), {"policy": "hybrid", "hessian": True, "fisher": "mc", "probes": 2}),
    (2, None, {"policy": "all", "memory_budget": "1MB", "fisher": "true"}),
    (4, (1, 1, 1), {"fisher": "empirical", "policy": "auto", "probes": 2}),
    (4, (1, 1, 1), {"fisher": "true", "policy": "small_only", "hessian": True, "probes": 2}),
    (2, (5,), {"fisher": "mc", "ekfac": True, "probes": 2}),
    (3, None, {"fisher": "mc", "memory_budget": "1MB", "probes": 2}),
]
"""(processes, rows of every batch of a tiny model, or None for a GPT, settings). With rows (1, 1, 1) one of four processes
has none."""
ROUNDING = ("asymmetry", "residual_bounds", "rounding", "resolution")
"""Numbers that measure rounding itself."""


def result_of(rows: tuple[int, ...] | None, told: dict[str, Any], grid: ProcessGrid) -> dict[str, Any]:
    subject = tiny(rows) if rows else from_config(small("none", **SHAPE), torch.device("cpu"), "fp64", 120, 8)
    return analyse(subject, Settings(**{"eigenvalues": 2, "probes": 0, "steps": 4, **told}), grid=grid)


def on_rank(rank: int, size: int, rows: tuple[int, ...] | None, told: dict[str, Any]) -> dict[str, Any]:
    return result_of(rows, told, ProcessGrid(rank, size, torch.device("cpu"), DataParallelKind.DDP))


def apart(one: Any, other: Any, scale: float, path: str = "") -> list[str]:
    """Where two results differ by more than 1e-10, relative to a number or to the largest of its list."""
    if isinstance(one, dict):
        names = [name for name in one if name not in ROUNDING]
        assert one.keys() == other.keys(), path
        return [line for name in names for line in apart(one[name], other[name], 0.0, f"{path}.{name}")]
    if isinstance(one, list):
        largest = max((abs(value) for value in one if isinstance(value, float)), default=0.0)
        assert len(one) == len(other), path
        return [
            line
            for i, pair in enumerate(zip(one, other, strict=True))
            for line in apart(*pair, largest, f"{path}[{i}]")
        ]
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) <= 1e-10 * max(scale, abs(one)) else [f"{path}: {one} and {other}"]
    return [] if one == other else [f"{path}: {one} and {other}"]


def measured(result: dict[str, Any]) -> dict[str, Any]:
    """What the processes must agree on: everything but times, and what of the record is about processes."""
    kfac = {name: value for name, value in result["kfac"].items() if name != "record"}
    layers = result["kfac"]["record"]["layers"]
    kfac["layers"] = {n: [layer["T"], layer["T_kept"], layer["N"], layer["lambda_G"]] for n, layer in layers.items()}
    return {"kfac": kfac, **{name: result[name] for name in ("ggn", "hessian", "data", "model") if name in result}}


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("size", "rows", "told"), CELLS if FULL else CELLS[:1])
def test_the_numbers_are_those_of_one_process(size: int, rows: tuple[int, ...] | None, told: dict[str, Any]) -> None:
    whole = result_of(rows, told, ProcessGrid())
    if "memory_budget" in told:  # a subset of the tokens is kept, the same one whoever has them
        assert whole["kfac"]["record"]["layers"]["head"]["sides"]["G"]["rank"] < 120 == whole["data"]["tokens"]
    for result in run_on_ranks(size, on_rank, rows, told):
        assert apart(measured(whole), measured(result), 0.0) == []
        assert result["processes"] == result["kfac"]["record"]["world_size"] == size


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_torchrun_prints_and_writes_once_what_one_process_does(tmp_path: Path) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(small(tmp_path / "run", **SHAPE, kfac={"kfac_policy": "hybrid"}).toml())
    asked = [
        "curvature",
        str(config),
        "--tokens",
        "40",
        "--dtype",
        "fp64",
        "--steps",
        "4",
        "--probes",
        "2",
        "--methods",
    ]
    assert main([*asked, "--device", "cpu", "--out", str(tmp_path / "one")]) == 0
    done = on_processes([*asked, "--device", "cpu", "--out", str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole model") == 1 and done.stdout.count("shared by 2 processes") == 1
    one, two = (json.loads((tmp_path / name / "curvature.json").read_text()) for name in ("one", "two"))
    assert apart(measured(one), measured(two), 0.0) == [] and two["settings"]["policy"] == "hybrid"
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        path.name for path in (tmp_path / "two").iterdir()
    )
    assert "2 processes" in (tmp_path / "two" / "methods.md").read_text()
    again = on_processes([*asked, "--device", "cpu", "--out", str(tmp_path / "two")])
    assert again.stderr.count("argument --out: ") == 1 and again.stderr.count("ends with 2") == 2
    bad = on_processes([*asked, "--policy", "some"])
    assert bad.stderr.count("argument --policy: 'some'; expected one of all, auto, hybrid, small_only") == 1
