"""What a run with K-FAC leaves: after every refresh λ, κ, tokens and clips of every layer; the trust region of every step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.curvature import KFACNaturalGradient
from gramian.curvature.persist.refresh_summary import refresh_summary, summary_line
from gramian.optim.kfac_optimizer import KFAC
from gramian.train.state.run_folder import read_lines
from tests.train.runs import run, small

TINY: dict[str, Any] = {
    "model": {"layers": 1, "width": 8, "heads": 1},
    "data": {"length": 8, "batch": 4},
    "precision": {"kind": "fp64"},
    "eval": {"every": 100, "windows": 2},
    "schedule": {"warmup": 1},
}
PAPER = {
    "damping": 1e-4, "max_condition_number": 1e6, "use_eigenvalue_correction": True, "update_freq": 10,
    "kfac_use_woodbury": True, "kfac_policy": "all", "woodbury_store_device": "auto", "woodbury_dtype": "fp16",
    "kfac_distributed_reduce": "gram", "kfac_eps": 1e-6,
}  # fmt: skip
"""The K-FAC options of the notes' paper configuration, key by key."""


def refreshes(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "kfac" in line]


def by_hand(block: Any, value: float, side: str, limit: float) -> tuple[float, float]:
    """(κ, share of eigenvalues raised) of M + λI under the limit, from the dense eigenvalues."""
    values = torch.linalg.eigvalsh(getattr(block, side).dense().double()).clamp(min=0) + value
    low = values < values.max() / limit
    return min(float(values.max() / values.min()), limit), float(low.double().mean())


@pytest.mark.parametrize("mode", ["pi", "factored"])
def test_every_refresh_leaves_what_the_dense_eigenvalues_say(mode: str, tmp_path: Path) -> None:
    """Steps 1, 4 and 7 refresh; every second one is logged, so two refreshes have a line of their own."""
    options = {"update_freq": 3, "damping": 1e-3, "max_condition_number": 30.0, "damping_mode": mode}
    trainer, _ = run(small(tmp_path / "run", **{**TINY, "run": {"steps": 7, "log_every": 2}}, kfac=options))
    found = refreshes(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 4, 7]
    assert ["loss" in line for line in found] == [False, True, False]
    assert [line["kfac"]["refresh"] for line in found] == [1, 2, 3]
    assert all(line["time"]["refresh_seconds"] > 0 and 0 < line["trust_region"] <= 1 for line in found)
    kfac, last = trainer.parts.stepper.kfac, found[-1]["kfac"]
    assert kfac is not None and (last["policy"], last["kappa_max"], last["damping_mode"]) == ("all", 30.0, mode)
    blocks = {name: block for name, block in kfac.kfac_factors.items() if block.A is not None}
    assert [*last["layers"]] == [*blocks]
    clipped = 0.0
    for name, block in blocks.items():
        layer = last["layers"][name]
        means = [float(torch.trace(m.dense()) / m.dim) for m in (block.A, block.G)]
        pi = (means[0] / means[1]) ** 0.5 if mode == "pi" else 1.0
        root = 1e-3**0.5 if mode == "pi" else 1e-3
        assert layer["T"] == 32
        for side, expected in (("A", root * pi), ("G", root / pi)):
            assert layer[f"lambda_{side}"] == pytest.approx(expected, rel=1e-5)
            kappa, share = by_hand(block, expected, side, 30.0)
            assert layer[f"clip_{side}"] == pytest.approx(share, abs=1e-6)
            if side in layer.get("bounds", ()):
                assert layer[f"kappa_{side}"] >= kappa * (1 - 1e-5)
            else:
                assert layer[f"kappa_{side}"] == pytest.approx(kappa, rel=1e-5)
            clipped += share
    assert clipped > 0 and 0 < last["clip_share"] < 1
    record = json.loads((tmp_path / "run" / "record.json").read_text())["kfac"]
    assert refresh_summary(record) == last


def test_the_optimizer_s_refreshes_have_the_damping_of_its_steps(tmp_path: Path) -> None:
    """λ = δ · mean eigenvalue of the weight's coordinates, as the step has it; not that of the K-FAC object inside."""
    told = {**TINY, "run": {"steps": 3}, "optimizer": {"kind": "kfac"}, "kfac": {"update_freq": 2, "damping": 0.3}}
    trainer, _ = run(small(tmp_path / "run", **told))
    last, optimizer = refreshes(tmp_path / "run")[-1], trainer.parts.optimizer
    assert isinstance(optimizer, KFAC) and last["step"] == 3 and "trust_region" not in last
    assert last["kfac"]["kappa_max"] is None and last["kfac"]["damping_mode"] == "relative"
    for name, block in optimizer.kfac.kfac_factors.items():
        layer = last["kfac"]["layers"][name]
        for side, width in (("A", block.spec.inputs - block.spec.has_bias), ("G", block.spec.outputs)):
            dense = getattr(block, side).dense()[:width, :width]
            expected = 0.3 * float(torch.trace(dense)) / width
            assert layer[f"lambda_{side}"] == pytest.approx(expected, rel=1e-5)
            assert layer[f"kappa_{side}"] >= by_hand(block, expected, side, math.inf)[0] * (1 - 1e-5)


def test_between_refreshes_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    record = KFACNaturalGradient.record
    monkeypatch.setattr(KFACNaturalGradient, "record", lambda kfac: seen.append(kfac.steps) or record(kfac))
    run(small(tmp_path / "run", **{**TINY, "run": {"steps": 6}}, kfac={"update_freq": 4}))
    assert seen == [1, 5, 6]  # two refreshes, and record.json at the end


def test_where_the_trust_region_binds_its_factor_goes_with_the_root_of_its_bound(tmp_path: Path) -> None:
    factors = []
    for bound in (1e-9, 4e-9):
        folder = tmp_path / str(bound)
        run(small(folder, **{**TINY, "run": {"steps": 2}}, kfac={"kl_clip": bound, "update_freq": 1}))
        factors.append(read_lines(folder / "metrics.jsonl")[0]["trust_region"])
    assert 0 < factors[0] < 1 and factors[1] == pytest.approx(2 * factors[0], rel=1e-6)


def test_the_line_of_a_refresh_has_policy_limit_and_share() -> None:
    layer = {"T": 8, "lambda_A": 0.5, "lambda_G": 0.25, "kappa_A": 3.0, "kappa_G": 40.0}
    told = {"refresh": 2, "policy": "hybrid", "damping_mode": "factored", "kappa_max": 1e6, "clip_share": 0.125}
    line = summary_line({**told, "layers": {"a": layer, "b": {**layer, "lambda_A": 2.0}}}, 0.5)
    assert line == (
        "K-FAC: refresh 2, 2 layers, policy=hybrid, damping=factored, λ_A 0.5 to 2, λ_G 0.25, κ_A up to 3, κ_G up to 40, "
        "κ_max=1e+06, clipped 12.50% of the eigenvalues, trust region × 0.5"
    )
    bare = summary_line({**told, "kappa_max": None, "clip_share": None, "layers": {}})
    assert bare == "K-FAC: refresh 2, 0 layers, policy=hybrid, damping=factored, κ_max=off"


def test_the_paper_configuration_of_the_notes_trains_as_it_stands(tmp_path: Path) -> None:
    """Its λ is 100 times smaller than the default; the trust region bears it."""
    told = {**TINY, "precision": {}, "run": {"steps": 12}, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}
    run(small(tmp_path / "run", **told, kfac=PAPER))
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert all(math.isfinite(line["loss"]) for line in lines) and lines[-1]["loss"] < lines[0]["loss"]
    record = json.loads((tmp_path / "run" / "record.json").read_text())["kfac"]
    assert {name: record["options"][name] for name in PAPER} == PAPER and record["refreshes"] == 2
    sides = [side for layer in record["layers"].values() for side in layer["sides"].values()]
    assert {side["dtype"] for side in sides} >= {"float16"} and all(side["kappa"] <= 1e6 for side in sides)
    assert any(side["representation"] == "low rank" for side in sides)
