"""The same run on any number of processes, in any number of micro-batches."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gramian.cli import main
from gramian.data import load_windows
from gramian.data.window_order import windows_at
from gramian.models.gpt import GPT, GPTConfig
from gramian.train.build.run_parts import build
from gramian.train.state.run_folder import read_lines
from gramian.verify.resume import train
from tests.kit.matrix import FULL
from tests.train.runs import ONE, PRIVATE, run, small


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def gradients(micro_batch: int, **sections: Any) -> dict[str, torch.Tensor]:
    sections["data"] = {"batch": 16, "micro_batch": micro_batch, **sections.get("data", {})}
    parts = build(small(**sections), ONE)
    batch = next(iter(parts.batches_from(0, ())))
    parts.stepper.watch(batch)
    return {name: p.grad.clone() for name, p in parts.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [8, 4, 5])
@pytest.mark.parametrize("pack", [True, False])
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(micro_batch: int, pack: bool) -> None:
    whole = gradients(16, data={"pack": pack, "length": 48})
    parts = gradients(micro_batch, data={"pack": pack, "length": 48})
    for name, expected in whole.items():
        assert (parts[name] - expected).norm() <= 1e-6 * expected.norm() + 1e-9, name


STEPS = 200 if FULL else 20
WORLDS = [(2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2")] if FULL else [(3, "fsdp2")]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("processes, strategy", WORLDS)
def test_the_loss_curve_does_not_depend_on_the_processes(processes: int, strategy: str, tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "run": {"steps": STEPS},
        "data": {"batch": 6, "pack": False, "micro_batch": 2},
        "precision": {"kind": "fp64"},
    }
    train(small(**told), tmp_path / "one")
    train(small(**told, parallel={"strategy": strategy}), tmp_path / "many", processes)
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert len(one) == len(many) == STEPS
    assert max(abs(a - b) for a, b in zip(one, many, strict=True)) < 1e-6
    assert one[-1] < one[0]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    "sections",
    [{"kfac": {"update_freq": 5}}, {"optimizer": {"kind": "kfac"}}, {"privacy": PRIVATE}],
    ids=["kfac", "optimizer kfac", "privacy"],
)
def test_natural_and_private_runs_are_sections_of_the_same_loop(sections: Any, tmp_path: Path) -> None:
    train(small(run={"steps": STEPS}, **sections), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    if "privacy" not in sections:
        assert found[-1] < found[0] - 0.3
    else:
        last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
        assert 0 < last["epsilon"] < 100
        assert "validation_loss" in last["not_covered_by_epsilon"]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.xdist_group("processes")
def test_compiled_sharded_and_recomputed_is_the_same_as_eager(tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": {"steps": 8}, "precision": {"kind": "fp64"}}
    train(small(**told), tmp_path / "eager")
    train(
        small(
            **told,
            parallel={"strategy": "fsdp2", "checkpoint_blocks": 1},
            compile={"mode": "default" if FULL else "off"},
        ),
        tmp_path / "all",
        2,
    )
    one, other = losses(tmp_path / "eager"), losses(tmp_path / "all")
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6


def test_the_loop_is_what_a_hand_written_one_does(tmp_path: Path) -> None:
    config = small(tmp_path / "run", data={"pack": False, "micro_batch": 3}, model={"tied": True})
    run(config)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]

    windows, _ = load_windows(config.data)
    model = GPT(GPTConfig(vocabulary=windows.vocabulary, context=32, layers=2, width=32, heads=2, tied=True))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step, line in enumerate(lines):
        rate = 3e-3 * (step + 1) / 5 if step < 5 else 3e-3 * 0.5 * (1 + math.cos(math.pi * (step - 5) / 34))
        batch = windows.stack(windows_at(step, len(windows), 8, 0))
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert line["lr"] == pytest.approx(rate, abs=1e-12)
        assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["bits_per_byte"] == windows.stream.bits_per_byte(line["loss"])
    assert len(lines) == 40


@pytest.mark.parametrize(
    "sections", [{}, pytest.param({"privacy": PRIVATE}, marks=pytest.mark.full)], ids=["plain", "private"]
)
def test_a_profile_is_printed_at_the_end_and_changes_no_number(
    sections: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for profiled in ("0", "1"):
        monkeypatch.setenv("GRAMIAN_PROFILE", profiled)
        path = tmp_path / f"{profiled}.toml"
        path.write_text(small(tmp_path / profiled, run={"steps": 6}, eval={"every": 3}, **sections).toml())
        assert main(["train", str(path)]) == 0
        printed = capsys.readouterr().out
        assert ("time of the parts" in printed) == (profiled == "1")
    phases = ("data", "evaluation", "backward", *(("norm", "noise") if sections else ("forward", "clip", "optimizer")))
    for phase in phases:
        row = re.search(rf"^ *{phase}\b.* (\d+) +[\d,.]+ +[\d.]+", printed, re.M)
        assert row is not None and int(row[1]) >= (2 if phase == "evaluation" else 6), phase
    assert losses(tmp_path / "0") == losses(tmp_path / "1")


@pytest.mark.parametrize(
    "sections", [{"kfac": {"update_freq": 3}}, {"optimizer": {"kind": "kfac"}}], ids=["natural", "optimizer"]
)
def test_the_record_has_the_facts_of_the_last_refresh(sections: Any, tmp_path: Path) -> None:
    run(small(tmp_path / "run", run={"steps": 7}, eval={"every": 100}, **sections))
    found = json.loads((tmp_path / "run" / "record.json").read_text())["kfac"]
    assert (found["steps"], found["refreshes"]) == (7, 3 if "kfac" in sections else 1)
    assert found["options"]["max_condition_number"] == 1e6
    for layer in found["layers"].values():
        assert layer["T_kept"] > 0 and layer["lambda_G"] > 0
        assert all(side["kappa"] >= 1 for side in layer["sides"].values())
