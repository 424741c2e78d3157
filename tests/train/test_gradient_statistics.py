"""`run.observe_every`: noise scale and layer health against a loop over the windows of a step; the run stays the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.data import load_windows
from gramian.data.window_order import windows_at
from gramian.report import write_report
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config
from gramian.train.health.gradient_statistics import problems_of
from gramian.train.state.run_folder import read_lines
from gramian.verify.resume import train
from tests.train.distilled import student
from tests.train.runs import events, run, small


def observed(config: Config | Path) -> dict[int, dict[str, Any]]:
    folder = Path(config.run.folder) if isinstance(config, Config) else config
    return {line["step"]: line for line in read_lines(folder / "metrics.jsonl") if "noise_scale" in line}


def losses(config: Config) -> list[float]:
    return [line["loss"] for line in read_lines(Path(config.run.folder) / "metrics.jsonl") if "loss" in line]


def oracle(config: Config) -> tuple[float, float]:
    """tr Σ and |G|² of the first step's windows, by one backward for each, in float64."""
    windows, _ = load_windows(config.data)
    model = build_model(config, windows.vocabulary).double()
    rows = windows.stack(windows_at(0, len(windows), config.data.batch, config.run.seed))
    gradients = []
    for tokens_T, targets_T in zip(rows["tokens"], rows["targets"], strict=True):
        model.zero_grad()
        F.cross_entropy(model(tokens_T[None])[0], targets_T).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    stacked = torch.stack(gradients)
    n, mean = len(stacked), stacked.mean(0)
    trace = float((stacked - mean).square().sum()) / (n - 1)
    return trace, float(mean.square().sum()) - trace / n


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_the_noise_scale_is_that_of_a_loop_over_the_windows(micro_batch: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "observe_every": 1}
    config = small(
        tmp_path, run=options, precision={"kind": "fp64"}, data={"micro_batch": micro_batch}, schedule={"warmup": 0}
    )
    run(config)
    line, (trace, signal) = observed(config)[1], oracle(config)
    assert line["noise_trace"] == pytest.approx(trace, rel=1e-9)
    assert line["noise_signal"] == pytest.approx(signal, rel=1e-8)
    assert line["noise_scale"] == (pytest.approx(trace / signal, rel=1e-8) if signal > 0 else None)


COMPILED = pytest.param("compiled", marks=pytest.mark.full)
MORE: dict[str, dict[str, Any]] = {
    "kfac": {"kfac": {"update_freq": 2}},
    "dropout": {"model": {"dropout": 0.1}},
    "compiled": {"compile": {"mode": "default"}},
}


@pytest.mark.parametrize(
    "kind", ["plain", "kfac", *(pytest.param(k, marks=pytest.mark.full) for k in ("dropout", "student")), COMPILED]
)
def test_the_run_is_the_same_with_and_without(kind: str, tmp_path: Path) -> None:
    make, more = student if kind == "student" else small, MORE.get(kind, {})
    configs = [make(tmp_path / str(n), run={"steps": 6, "observe_every": n, "log_every": 1}, **more) for n in (0, 2)]
    for config in configs:
        run(config)
    assert losses(configs[0]) == losses(configs[1])
    assert set(observed(configs[1])) == {2, 4, 6} and not observed(configs[0])
    assert not events(configs[1], "not_observed")
    layers = observed(configs[1])[2]["layers"]
    assert {"blocks.0", "head"} <= {name.removeprefix("model.").split(".qkv")[0] for name in layers} | {"head"}
    assert all(layer["gradient"] > 0 and layer["nonfinite"] == 0 for layer in layers.values())


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("strategy", "micro_batch"), [("ddp", 1), pytest.param("fsdp2", 0, marks=pytest.mark.full)])
def test_two_processes_measure_what_one_does(strategy: str, micro_batch: int, tmp_path: Path) -> None:
    """Of five windows, one at a time, the second process has two and a row that fills up."""
    told: dict[str, Any] = {
        "run": {"steps": 2, "observe_every": 1, "log_every": 1},
        "data": {"batch": 5, "micro_batch": micro_batch, "pack": False},
        "precision": {"kind": "fp64"},
    }
    alone = small(tmp_path / "one", **told, schedule={"warmup": 0})
    run(alone)
    train(small(**told, schedule={"warmup": 0}, parallel={"strategy": strategy}), tmp_path / "many", 2)
    many = observed(tmp_path / "many")
    for step, line in observed(alone).items():
        for name in ("noise_trace", "noise_signal"):
            assert many[step][name] == pytest.approx(line[name], rel=1e-8)
        for name, layer in line["layers"].items():
            assert many[step]["layers"][name]["gradient"] == pytest.approx(layer["gradient"], rel=1e-9)


def test_a_model_that_couples_its_windows_is_trained_and_not_observed(tmp_path: Path) -> None:
    config = small(tmp_path, run={"steps": 6, "observe_every": 2})

    def couple(parts: Any) -> None:
        parts.model.blocks[0].register_forward_hook(lambda module, inputs, out: out - 0.1 * out.mean(0))

    _, ended = run(config, couple)
    assert ended.reason == "done" and not observed(config)
    (event,) = events(config, "not_observed")
    assert "blocks.0" in event["text"] or "blocks.1" in event["text"]


def test_layers_that_are_ill_are_named() -> None:
    well = {"input": 1.0, "zeros": 0.1, "gradient": 1.0, "nonfinite": 0}
    layers = {"a": well, "b": {**well, "zeros": 1.0}, "c": {**well, "gradient": 0.0}, "d": {**well, "nonfinite": 3}}
    assert problems_of(layers) == [
        "b: its input is all zeros", "c: gets no gradient", "d: 3 values are not finite",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"run": {"observe_every": 15, "log_every": 10}}, "run.observe_every"),
        ({"run": {"observe_every": -1}}, "run.observe_every"),
        ({"run": {"observe_every": 10}, "privacy": {"noise_multiplier": 1.0}}, "run.observe_every"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(sections: dict[str, Any], field: str) -> None:
    with pytest.raises(GramianError, match=f"^{field}: .*xpected"):
        small(**sections)


def test_the_page_has_the_noise_scale_and_the_layers(tmp_path: Path) -> None:
    config = small(tmp_path, run={"steps": 6, "observe_every": 1, "log_every": 1})
    run(config)
    page = write_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    for title in ("Gradient noise scale", "Output gradient of layers", "Zeros in the input of layers"):
        assert title in page
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["layers"]
