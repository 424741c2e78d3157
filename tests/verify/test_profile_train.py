"""`gramian profile train`: phases of the run's own steps, ratios of knobs that leave no trace, and one-line errors."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gramian.cli import main
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.world import world
from gramian.train.build.run_parts import build
from gramian.train.config.config import Config, parse_config
from gramian.verify.profiles import train_knobs, train_profile
from tests.kit.waiting import PATIENCE

TINY = [
    "model.layers=1", "model.width=16", "model.heads=2", "data.length=16", "data.batch=4", "data.micro_batch=2",
    "data.workers=0", "data.limit_bytes=300000",
]  # fmt: skip
COMMAND = ["profile", "train", *TINY, "--cpu"]
KNOBS = {
    ("activation checkpointing", "step"): ["0", "1"],
    ("attention", "step"): ["sdpa", "written out"],
    ("AdamW", "step"): ["fused", "foreach", "loop"],
    ("AdamW", "optimizer.step()"): ["fused", "foreach", "loop"],
}


@pytest.fixture(autouse=True)
def globals_stay() -> Iterator[None]:
    """A run decides about deterministic kernels and TF32 for its process; the tests after this one decide themselves."""
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)


def tiny(**sections: Any) -> Config:
    told: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2},
        "data": {"length": 16, "batch": 4, "workers": 0, "limit_bytes": 300_000},
    }
    return parse_config({**told, **sections})


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A config file."""
    path = tmp_path / "run.toml"
    path.write_text('[run]\ndevice = "cpu"\n[kfac]\n')
    return str(path)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["none.toml"], ["none.toml", "cannot be read"]),
        (["run.step=3"], ["run.step", "did you mean run.steps?"]),
        (["{written}", "run.step=3"], ["run.step", "did you mean run.steps?"]),
        (["{written}", "data.source=text", 'data.files=["none.txt"]'], ["data.files", "none.txt", "does not exist"]),
        (["privacy.noise_multiplier=1"], ["privacy", "gramian profile clipping"]),
        (["--iterations", "9"], ["--iterations", "'9'", "expected an integer of at least 10"]),
        (["--iterations", "ten"], ["--iterations", "'ten'", "expected"]),
        (["--json", "/"], ["--json", "Is a directory", "expected"]),
        (["--json", "/dev/null/x"], ["--json", "/dev/null/x", "expected a file that can be written"]),
        (["--layers", "2"], ["--layers", "expected gramian profile train"]),
        (["--fsdp"], ["--fsdp", "expected gramian profile train"]),
        (["--mode", "keep"], ["--mode", "'keep'", "expected gramian profile train"]),
    ],
)
def test_bad_input_exits_2_with_one_line_that_says_what_is_accepted(argv, names, capsys, written):
    assert main(["profile", "train", *(part.format(written=written) if "{" in part else part for part in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for name in names:
        assert name in captured.err


@pytest.mark.parametrize("target", ["kfac", "clipping"])
def test_what_belongs_to_train_is_refused_elsewhere(target, capsys):
    assert main(["profile", target, "--compile"]) == 2
    assert f"expected gramian profile {target}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["profile", "train", "run.device=cuda"]) == 2
    assert "run.device: there is no CUDA device" in capsys.readouterr().err


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What the command prints, and the numbers it writes."""
    file = tmp_path_factory.mktemp("profile") / "new" / "train.json"
    done = subprocess.run(
        [sys.executable, "-m", "gramian", *COMMAND, "--json", str(file)],
        capture_output=True, text=True, check=False, env=_environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, json.loads(file.read_text())


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.full
def test_phases_and_knobs_have_a_row_each(profiled):
    printed, _ = profiled
    assert all(character == "\n" or character.isprintable() for character in printed)
    spread = r"[\d,]+\.\d\d±[\d,]+\.\d\d"
    for phase in ("data wait", "forward", "backward", "optimizer"):
        assert re.search(rf"^ {phase} +{spread} +\d+%", printed, re.MULTILINE), phase
    assert not re.search("^ communication", printed, re.MULTILINE)  # nobody to talk to
    for knob, variants in (("parallel.checkpoint_blocks", "01"), ("attention", ["sdpa", "written out"])):
        assert re.search(rf"^ {knob} +step +{variants[0]} +{spread} +1\.00", printed, re.MULTILINE), knob
        assert re.search(rf"^ +{variants[1]} +{spread} +\d+\.\d\d", printed, re.MULTILINE), knob
    assert "compile.mode was not measured: --compile does" in printed
    assert "…" not in printed  # no column was cut


@pytest.mark.full
def test_the_json_holds_every_figure(profiled):
    _, numbers = profiled
    assert set(numbers["phases"]) == set(train_profile.PHASES)
    assert (numbers["processes"], numbers["parallel"], numbers["device"]) == (1, "one", "cpu")
    assert (numbers["iterations"], numbers["tokens"], numbers["micro_batches"]) == (10, 64, 2)
    assert numbers["config"]["model"]["width"] == 16
    assert numbers["phases"]["communication"]["high"] == 0
    for spread in (*numbers["phases"].values(), numbers["total"]):
        assert 0 <= spread["low"] <= spread["median"] <= spread["high"]
    parts = sum(spread["median"] for spread in numbers["phases"].values())
    assert 0.3 * numbers["total"]["median"] < parts < 1.5 * numbers["total"]["median"]
    assert numbers["memory"]["above"] > 0
    found = {
        (knob["name"], knob["what"]): [variant["name"] for variant in knob["variants"]] for knob in numbers["knobs"]
    }
    assert found == KNOBS
    for knob in numbers["knobs"]:
        assert knob["variants"][0]["ratio"] == 1 and knob["failure"] == ""
        assert all(variant["seconds"]["median"] > 0 for variant in knob["variants"])
    plain, recomputed = numbers["knobs"][0]["variants"]
    assert recomputed["memory"] < plain["memory"]


@pytest.mark.full
def test_steps_are_counted_for_the_bar(monkeypatch):
    monkeypatch.setattr(train_knobs, "highest_on_cpu", lambda step: None)
    calls: list[str] = []
    where = ProcessGrid(0, 1, torch.device("cpu"), "one")
    config = tiny(kfac={"update_freq": 2}, parallel={"checkpoint_blocks": 1})
    found = train_profile.profile_train(config, where, on_progress=calls.append)
    assert len(calls) == train_profile.turns(10, compiled=False)
    assert [variant.name for variant in found.knobs[0].variants] == ["0", "1"]
    assert calls[0] == "step" and set(calls[1:]) == {"step", *(name for name, _ in KNOBS)}
    assert found.phases["optimizer"].median > found.knobs[-1].variants[0].seconds.median  # K-FAC is in the first


def test_a_goose_has_the_same_knobs():
    config, where = (
        tiny(model={"kind": "goose", "layers": 1, "width": 16}),
        ProcessGrid(0, 1, torch.device("cpu"), "one"),
    )
    found = list(train_knobs.profile_knobs(config, where, 1, False, lambda name: None))
    assert {(knob.name, knob.what): knob.failure for knob in found} == dict.fromkeys(KNOBS, "")


def test_a_knob_that_fails_exits_1_after_the_others(capsys, monkeypatch, tmp_path):
    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")

    monkeypatch.setattr(train_knobs, "written_out_attention", fail)
    monkeypatch.setattr(train_knobs, "highest_on_cpu", lambda step: None)
    assert main([*COMMAND, "--json", str(tmp_path / "x.json")]) == 1
    captured = capsys.readouterr()
    assert "not measured: attention: OutOfMemoryError" in captured.out and "optimizer.implementation" in captured.out
    assert captured.err == (
        "gramian: profile train: attention: OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB.\n"
    )
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_step_that_fails_exits_1_with_one_line(capsys, monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room here")

    monkeypatch.setattr(train_profile, "_phases", fail)
    assert main(COMMAND) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "gramian: profile train: MemoryError: no room here\n")


@pytest.mark.parametrize("masked", ["causal", "bool", "float", "gqa"])
def test_written_out_attention_is_attention(masked):
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64).unbind()
    options: dict[str, Any] = {"is_causal": True}
    if masked == "bool":
        options = {"attn_mask": torch.rand(2, 1, 7, 7) + torch.eye(7) > 0.5, "scale": 0.3}
    if masked == "float":
        options = {"attn_mask": torch.randn(7, 7, dtype=torch.float64)}
    if masked == "gqa":
        k, v, options = k[:, :2], v[:, :2], {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(train_knobs.written_out_attention(q, k, v, **options), expected)


def test_attention_is_written_out_in_that_variant_alone():
    calls = []
    sdpa, way = train_knobs._attention_ways(lambda: calls.append(F.scaled_dot_product_attention))
    for step in (way.step, sdpa.step):
        step()
    assert calls == [train_knobs.written_out_attention, torch._C._nn.scaled_dot_product_attention]


@pytest.mark.full
def test_compiling_is_turned_on_and_off_again():
    model = build(tiny(), ProcessGrid(0, 1, torch.device("cpu"), "one")).model
    off, on = train_knobs._compiled_ways(model, "default", lambda: None)
    on.enter()
    assert model._compiled_call_impl is not None
    off.enter()
    assert model._compiled_call_impl is None


@pytest.mark.slow
@pytest.mark.full
def test_compile_is_measured_if_asked_for(capsys):
    assert main([*COMMAND, "--compile"]) == 0
    assert re.search(r"^ compile.mode +step +off .*\n +default ", capsys.readouterr().out, re.MULTILINE)


def test_passes_without_communication_leave_fsdp2_as_it_was():
    """The steps after them are those of a run without them."""
    with world(cpu=True, fsdp=True) as where:
        found = []
        for quiet in (False, True):
            parts = build(tiny(), where)
            batches = iter(parts.batches_from(0, ()))
            for _ in range(3):
                batch = next(batches)
                parts.stepper.take(batch, 1e-3)
                if quiet:
                    with train_profile._without_communication(parts.module):
                        parts.stepper.watch(batch)
                        assert all(
                            not isinstance(p, torch.distributed.tensor.DTensor) for p in parts.module.parameters()
                        )
                        assert all(p.grad is not None for p in parts.module.parameters())
            found.append(copy.deepcopy([p.detach().full_tensor() for p in parts.module.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_under_torchrun_the_first_process_alone_speaks(strategy, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    file = tmp_path / "train.json"
    command = [*COMMAND[:-1], f"parallel.strategy={strategy}", "--cpu", "--json", str(file)]
    done = subprocess.run(
        [*launcher, "-m", "gramian", *command],
        capture_output=True, text=True, check=False, env=_environment(), timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training step on CPU") == 1
    assert ("FSDP2 over 2" if strategy == "fsdp2" else "DDP over 2") in done.stdout
    assert re.search(r"^ communication +\d", done.stdout, re.MULTILINE)
    numbers = json.loads(file.read_text())
    assert numbers["processes"] == 2 and numbers["tokens"] == 64
    assert numbers["phases"]["communication"]["high"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compile_and_memory_are_measured(tmp_path):
    file = tmp_path / "train.json"
    assert main([*COMMAND[:-1], "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["knobs"][0]["key"] == "compile.mode" and numbers["memory"]["reserved"] > 0
