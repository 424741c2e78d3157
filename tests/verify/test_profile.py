"""`gramian profile`: tables that a person can read, figures that are those of the run, and one-line errors."""

import json
import math
import os
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._traffic import TrafficSide
from gramian.cli import main
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy import PrivacyEngine
from gramian.verify.profiles import clipping_profile, clipping_scaling, kfac_profile
from gramian.verify.profiles.measurements import TimingSpread
from gramian.verify.profiles.profiled_model import reference_gpt
from tests.cli.torchrun import on_processes
from tests.kit.processes import run_on_ranks
from tests.kit.waiting import PATIENCE

ONE = ProcessGrid(0, 1, torch.device("cpu"), "one")
TINY = ["profile", "kfac", "--cpu", "--batch-size", "2", "--layers", "1", "--width", "16", "--vocabulary", "32"]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], ["TARGET", "expected clipping, kfac"]),
        (["everything"], ["'everything'", "unknown", "expected clipping, kfac"]),
        (["kfac", "--mode", "keep"], ["--mode", "'keep'", "not for profile kfac"]),
        (["kfac", "--algorithm", "gram"], ["--algorithm", "'gram'", "not for profile kfac"]),
        (["kfac", "run.toml"], ["run.toml", "cannot be read"]),
        (["kfac", "run.toml", "--width", "64"], ["--width", "without CONFIG.toml"]),
        (["kfac", "--iterations", "20"], ["--iterations", "20", "not for profile kfac"]),
        (["kfac", "--json", "/"], ["--json", "Is a directory", "expected"]),
        (["kfac", "--reduce", "ring"], ["--reduce", "'ring'", "expected gram, gather, dense, none"]),
        (["kfac", "--offload", "--cpu"], ["--offload", "on the CPU", "expected a GPU"]),
        (["clipping", "--reduce", "gram"], ["--reduce", "'gram'", "not for profile clipping"]),
        (["train", "--offload"], ["--offload", "not for profile train"]),
        (["clipping", "run.toml"], ["run.toml", "cannot be read"]),
        (["clipping", "--mode", "fast"], ["--mode", "'fast'", "expected auto, bookkeeping, keep, two_pass"]),
        (["clipping", "--algorithm", "ghost"], ["--algorithm", "'ghost'", "expected auto, gram, direct"]),
        (
            ["clipping", "--mode", "keep", "--algorithm", "gram"],
            ["--algorithm", "'gram'", "--mode keep", "expected auto"],
        ),
        (["clipping", "--iterations", "9"], ["--iterations", "'9'", "expected an integer of at least 10"]),
        (["clipping", "--iterations", "ten"], ["--iterations", "'ten'", "expected"]),
        (["clipping", "--seq-lengths", "0"], ["--seq-lengths", "'0'", "expected"]),
        (["clipping", "--width", "30"], ["--width", "30", "a multiple of heads"]),
        (["clipping", "--out", "/dev/null/x"], ["--out", "/dev/null/x", "expected a file that can be written"]),
        (["clipping", "--json", "/"], ["--json", "Is a directory", "expected"]),
        (["kfac", "--seq-lengths", "128", "long"], ["--seq-lengths", "'long'", "expected an integer of at least 1"]),
        (["kfac", "--batch-size", "0"], ["--batch-size", "'0'", "expected"]),
        (["kfac", "--width", "30"], ["--width", "30", "a multiple of heads"]),
        (["kfac", "--seq-lengths"], ["--seq-lengths", "expected at least one argument"]),
    ],
)
def test_bad_input_exits_2_with_one_line_that_says_what_is_accepted(argv, names, capsys):
    assert main(["profile", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for name in names:
        assert name in captured.err


# ---- kfac ------------------------------------------------------------------------------------------------------------


def test_every_sequence_length_has_a_row_per_stage(capsys):
    assert main([*TINY, "--seq-lengths", "8", "24"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(character == "\n" or character.isprintable() for character in captured.out)
    number = r"[\d,]+\.\d+"
    for stage in ("plain step", "capture", "decompose", "apply"):
        rows = re.findall(rf"{stage} +({number}) +({number}) +({number}) +({number}) +({number})", captured.out)
        assert len(rows) == 2, stage
    assert re.search(rf"^ +8  plain step +{number} +1\.00 ", captured.out, re.MULTILINE)
    assert re.search(r"^ +24 +48 +0\.\d .* dense", captured.out, re.MULTILINE)


CONFIGURED = """
[run]
device = "cpu"
[model]
{model}
layers = 1
width = 16
[data]
length = 12
batch = 2
"""


@pytest.mark.parametrize("model", ['kind = "gpt"\nheads = 2', 'kind = "goose"'], ids=["gpt", "goose"])
def test_a_config_decides_model_length_and_batch(model, capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIGURED.format(model=model))
    assert main(["profile", "kfac", str(path), "model.width=24", "--json", str(tmp_path / "kfac.json")]) == 0
    assert "1 layer, width 24, vocabulary 257; batch 2" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "kfac.json").read_text())
    (profile,) = numbers["profiles"]
    assert (profile["length"], profile["tokens"]) == (12, 24)
    assert numbers["model"]["width"] == 24 and numbers["model"]["context"] == 12


def test_clipping_takes_a_config_too(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIGURED.format(model="heads = 2"))
    assert main(["profile", "clipping", str(path), "--out", str(tmp_path)]) == 0
    assert "gpt of the config: 1 layer, width 16" in capsys.readouterr().out
    assert json.loads((tmp_path / "clipping.json").read_text())["options"]["seq_lengths"] == [12]


def test_stages_ratios_and_bytes_are_those_of_the_run():
    config = reference_gpt(layers=1, width=16, vocabulary=32, context=8)
    calls = []
    found = kfac_profile.profile_kfac(config, 8, 2, ONE, rounds=2, on_progress=lambda: calls.append(1))
    assert [stage.name for stage in found.stages] == ["plain step", "capture", "decompose", "apply"]
    assert found.stages[0].ratio == 1.0
    assert all(stage.seconds >= 0 for stage in found.stages)
    assert found.tokens == 16
    assert 0 < found.factor_bytes < found.used_bytes
    assert len(calls) == kfac_profile.WARM_UP + 2


def test_memory_on_the_cpu_is_that_of_the_process():
    config = reference_gpt(layers=1, width=16, vocabulary=32, context=8)
    memory = kfac_profile.profile_kfac(config, 8, 2, ONE, rounds=1).stages[0].memory
    assert memory.before is not None and memory.after is not None and memory.peak is not None
    assert 10e6 < memory.before <= memory.peak >= memory.after
    assert memory.reserved is None


def test_factors_that_are_kept_elsewhere_have_stages_of_their_own():
    """On the CPU nothing moves; what is measured is."""
    config = reference_gpt(layers=1, width=16, vocabulary=32, context=8)
    found = kfac_profile.profile_kfac(config, 8, 2, ONE, offload=True, rounds=1)
    assert [stage.name for stage in found.stages][-2:] == ["offload", "fetch"]
    assert found.offloaded_bytes == 0 and found.collectives == ()


def profile_of_processes(rank: int, size: int, reduce: str) -> kfac_profile.KFACProfile:
    config = reference_gpt(layers=1, width=16, vocabulary=32, context=4)
    return kfac_profile.profile_kfac(
        config, 4, 1, ProcessGrid(rank, size, torch.device("cpu"), "ddp"), reduce, rounds=1
    )


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("reduce", ["gram", "gather"])
def test_several_processes_show_what_they_send_by_kind_of_collective(reduce):
    """Of blocks.0.fc, whose output side has the 8 tokens of both processes: what the model of traffic says is among it."""
    for found in run_on_ranks(2, profile_of_processes, reduce):
        stages = {stage.name: stage for stage in found.stages}
        assert 0 < stages["reduce"].seconds <= stages["capture"].seconds
        sent = {(seen.stage, seen.kind): seen.sent for seen in found.collectives}
        assert all(seen.seconds > 0 for seen in found.collectives)
        side = TrafficSide(64, (4, 4), row_bytes=4)
        if reduce == "gram":
            assert sent["capture", "all_to_all"] >= side.join("gram")["all_to_all"]
            assert sent["apply", "all_gather"] >= side.use("gram", 17)["all_gather"]
            assert sent["first use", "all_reduce"] - sent["apply", "all_reduce"] >= side.gram("gram")["all_reduce"]
        else:
            assert sent["capture", "all_gather"] >= side.join("gather")["all_gather"]
            assert not any(stage == "apply" for stage, _ in sent)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
def test_the_first_process_alone_prints_the_profile_and_writes_the_numbers(option, tmp_path):
    done = on_processes([*TINY, "--seq-lengths", "4", *option, "--json", str(tmp_path / "kfac.json")])
    assert done.returncode == 0, done.stderr
    assert all(f"process {rank} ends with 0" in done.stderr for rank in (0, 1))
    assert done.stdout.count("K-FAC on CPU") == 1
    assert f"{'FSDP2' if option else 'DDP'} over 2, joined by gram" in done.stdout
    assert re.search(r"capture +all-to-all +\d+\.\d{3} +\d+\.\d\d", done.stdout)
    numbers = json.loads((tmp_path / "kfac.json").read_text())
    assert numbers["processes"] == 2 and numbers["profiles"][0]["collectives"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
def test_a_profile_that_fails_on_one_process_ends_both_with_1():
    breaks = (
        "from gramian.curvature.estimate.token_moments import TokenMoment\n"
        "plain = TokenMoment.row_matrix\n"
        "def broken(self, bias):\n"
        "    if rank == 1: raise RuntimeError('no luck')\n"
        "    return plain(self, bias)\n"
        "TokenMoment.row_matrix = broken\n"
    )
    done = on_processes([*TINY, "--seq-lengths", "4"], breaks)
    assert done.returncode == 1
    assert all(f"process {rank} ends with 1" in done.stderr for rank in (0, 1)), done.stderr
    assert done.stderr.count("gramian: profile kfac: ") == 1


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (1024, 16), (96, 4), (64, 4)])
def test_heads_are_64_wide_where_that_fits(width, heads):
    assert reference_gpt(1, width, 16, 8).facts["heads"] == heads


def test_running_out_of_memory_exits_1_after_what_was_measured(capsys, monkeypatch):
    measure = kfac_profile.profile_kfac

    def fail_on_long(config: Any, length: int, *rest: Any, **options: Any) -> Any:
        if length > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")
        return measure(config, length, *rest, **options)

    monkeypatch.setattr(kfac_profile, "profile_kfac", fail_on_long)
    assert main([*TINY, "--seq-lengths", "8", "24"]) == 1
    captured = capsys.readouterr()
    assert "plain step" in captured.out
    assert captured.err == (
        "gramian: profile kfac: sequence length 24: OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB.\n"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_gpu_is_that_of_its_allocator(capsys):
    assert main([*(part for part in TINY if part != "--cpu"), "--seq-lengths", "16"]) == 0
    out = capsys.readouterr().out
    assert "reserved" in out and "bfloat16 autocast" in out


# ---- clipping --------------------------------------------------------------------------------------------------------

CLIPPING = ["profile", "clipping", "--cpu", "--batch-size", "2", "--layers", "1", "--width", "16", "--vocabulary", "32"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command prints, and the folder it writes into."""
    out = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-m", "gramian", *CLIPPING, "--seq-lengths", "24", "8", "16", "8", "--out", str(out)]
    done = subprocess.run(
        [*command, "--json", str(out / "more.json")], capture_output=True, text=True, check=False, env=_environment()
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, out


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.full
@pytest.mark.full
def test_every_length_has_its_phases_the_plain_step_and_the_ratio(profiled):
    printed, _ = profiled
    assert all(character == "\n" or character.isprintable() for character in printed)
    number, spread = r"[\d,]+\.\d", r"[\d,]+\.\d±[\d,]+\.\d"
    for length in (8, 16, 24):
        assert re.search(rf"^ +{length}( +{number}){{7}}( +{spread}){{2}} +\d+\.\d\d +\d+\.\d\d", printed, re.MULTILINE)
        assert re.search(rf"^plan at {length}: .* sum.*; holds ", printed, re.MULTILINE)
    assert "…" not in printed  # no column was cut
    for name in ("private step", "plain step", "norms", "memory, private"):
        assert re.search(rf"^ {name} +-?\d+\.\d\d +-?\d+\.\d\d to -?\d+\.\d\d ", printed, re.MULTILINE), name
    assert re.search(r"^verdict at 24: forward \d+%, .*communication 0% of the backward$", printed, re.MULTILINE)


@pytest.mark.full
@pytest.mark.full
def test_the_json_holds_every_figure(profiled):
    _, out = profiled
    numbers = json.loads((out / "clipping.json").read_text())
    assert numbers == json.loads((out / "more.json").read_text())
    assert numbers["options"]["seq_lengths"] == [8, 16, 24]
    assert (numbers["processes"], numbers["parallel"], numbers["device"]) == (1, "one", "cpu")
    for profile in numbers["profiles"]:
        assert set(profile["phases"]) == set(clipping_profile.PHASES)
        assert sum(profile["shares"].values()) == pytest.approx(1)
        for spread in (*profile["phases"].values(), profile["private"]["total"], profile["plain"]["total"]):
            assert 0 <= spread["low"] <= spread["median"] <= spread["high"]
        assert profile["ratio"] == profile["private"]["total"]["median"] / profile["plain"]["total"]["median"]
        assert profile["private"]["memory"]["above"] > 0 < profile["plain"]["memory"]["above"]
        assert profile["private"]["memory"]["reserved"] is None
        assert not profile["flagged"] and profile["communication_of_backward"] == 0
        assert {"norm", "clip", "noise"} <= {line["phase"] for line in profile["layers"]}
        assert sum(profile["ways"].values()) == sum(line["phase"] == "norm" for line in profile["layers"])
        assert [line["what"] for line in profile["layers"] if line["phase"] == "noise"] == ["17 parameters"]
    assert numbers["scaling"]["memory, plain"]["exponent"] > 0.5


@pytest.mark.full
def test_the_picture_is_well_formed_and_holds_every_length(profiled):
    _, out = profiled
    picture = xml.dom.minidom.parse(str(out / "clipping.svg"))
    words = {node.firstChild.data for node in picture.getElementsByTagName("text")}
    assert {"8", "16", "24", "milliseconds", "O(T)", "O(T²)", "private step", "norm", "clip"} <= words
    assert len(picture.getElementsByTagName("polyline")) == 5


@pytest.mark.parametrize(
    ("mode", "ways"), [pytest.param("two_pass", "two passes, nothing held", marks=pytest.mark.full), ("keep", "keep")]
)
def test_modes_and_algorithms_are_those_asked_for(mode, ways, capsys, tmp_path):
    assert main([*CLIPPING, "--seq-lengths", "8", "--mode", mode, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"mode {mode}" in printed and ways in printed
    assert "95 % interval" not in printed  # one length has no exponent


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["gram", "direct"])
def test_a_forced_algorithm_is_taken_everywhere(algorithm):
    config = reference_gpt(1, 16, 32, 8)
    where = ProcessGrid(0, 1, torch.device("cpu"), "one")
    calls = []
    found = clipping_profile.profile_clipping(
        config, 8, 2, where, mode="bookkeeping", algorithm=algorithm, on_progress=lambda: calls.append(1)
    )
    assert found.ways[algorithm] == 5 and set(found.ways) == {algorithm, "sum", "rows"}
    assert len(calls) == clipping_profile.rounds(10)


@pytest.mark.full
def test_a_failing_length_exits_1_after_what_was_measured(capsys, monkeypatch, tmp_path):
    measure = clipping_profile.profile_clipping

    def fail_on_long(config: Any, length: int, *rest: Any, **options: Any) -> Any:
        if length > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")
        return measure(config, length, *rest, **options)

    monkeypatch.setattr(clipping_profile, "profile_clipping", fail_on_long)
    assert main([*CLIPPING, "--fsdp", "--seq-lengths", "8", "24", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "FSDP2 over 1" in captured.out and (tmp_path / "clipping.json").exists()
    assert captured.err == (
        "gramian: profile clipping: sequence length 24: OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB.\n"
    )
    assert not torch.distributed.is_initialized()


def test_the_engine_is_gone_after_a_failure(monkeypatch):
    config = reference_gpt(1, 16, 32, 8)
    where = ProcessGrid(0, 1, torch.device("cpu"), "one")
    detached = []

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(PrivacyEngine, "backward", fail)
    monkeypatch.setattr(PrivacyEngine, "detach", lambda engine: detached.append(engine))
    with pytest.raises(RuntimeError, match="no"):
        clipping_profile.profile_clipping(config, 8, 2, where)
    assert len(detached) == 1


def clipping_of_processes(rank: int, size: int) -> clipping_profile.ClippingProfile:
    config = reference_gpt(layers=1, width=16, vocabulary=32, context=8)
    return clipping_profile.profile_clipping(config, 8, 2, ProcessGrid(rank, size, torch.device("cpu"), "ddp"))


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_what_processes_send_is_a_phase():
    for found in run_on_ranks(2, clipping_of_processes):
        assert found.phases["communication"].median > 0
        assert "all-reduce" in {line["way"] for line in found.layers if line["phase"] == "communication"}


def _torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Two processes; their exit codes are in the last line of what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, check=False, env=_environment(), timeout=PATIENCE
    )


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("options", [pytest.param([], id="ddp"), pytest.param(["--fsdp"], id="fsdp2")])
@pytest.mark.full
def test_under_torchrun_the_first_process_alone_speaks(options, tmp_path):
    done = _torchrun("-m", "gramian", *CLIPPING, "--seq-lengths", "8", "--out", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Private step on CPU") == 1
    assert ("FSDP2 over 2" if options else "DDP over 2") in done.stdout
    numbers = json.loads((tmp_path / "clipping.json").read_text())
    assert numbers["processes"] == 2
    assert numbers["profiles"][0]["phases"]["communication"]["median"] > 0
    ways = {line["way"] for line in numbers["profiles"][0]["layers"] if line["phase"] == "communication"}
    assert ("reduce-scatter" if options else "all-reduce") in ways


FAILING = """
import os, sys
from gramian.cli import main
from gramian.verify.profiles import clipping_profile

measure = clipping_profile.profile_clipping
def fail_on_one(*args, **options):
    if os.environ["RANK"] == "1":
        raise MemoryError("no room here")
    return measure(*args, **options)
clipping_profile.profile_clipping = fail_on_one
status = main(sys.argv[2:])
open(sys.argv[1] + os.environ["RANK"], "w").write(str(status))
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.full
def test_a_process_that_fails_alone_ends_all_with_one_exit_code_and_one_line(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = _torchrun(str(script), str(tmp_path / "status"), *CLIPPING, "--seq-lengths", "8", "--out", str(tmp_path))
    assert [(tmp_path / f"status{rank}").read_text() for rank in (0, 1)] == ["1", "1"], done.stderr
    assert done.stderr.count("gramian: profile clipping:") == 1
    assert "process 1: sequence length 8: MemoryError: no room here" in done.stderr


# ---- exponents and advice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("power", "growth"), [(1, "O(T)"), (2, "O(T²)"), (0, "less than"), (1.5, "between"), (3, "more than")]
)
def test_the_exponent_of_a_power_law_is_found(power, growth):
    lengths = [64, 128, 256, 512]
    fit = clipping_scaling.fit_power(lengths, [3e-4 * length**power for length in lengths])
    assert fit is not None and fit.low is not None and fit.high is not None
    assert fit.exponent == pytest.approx(power, abs=1e-9)
    assert fit.high - fit.low < 1e-6
    assert fit.growth.startswith(growth)


def test_the_interval_is_that_of_the_textbook():
    # log2 T = 1, 2, 3, 4 and log2 cost = 1, 3, 2, 4: slope 0.8, residual sum of squares 1.8, so s.e. √(0.9/5).
    fit = clipping_scaling.fit_power([2, 4, 8, 16], [2, 8, 4, 16])
    assert fit is not None and fit.low is not None and fit.high is not None
    assert fit.exponent == pytest.approx(0.8)
    assert (fit.high - fit.low) / 2 == pytest.approx(4.303 * math.sqrt(0.18), rel=1e-3)
    assert fit.growth == "O(T) or O(T²): the interval holds both"


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    lengths, held = [64, 128, 256, 512, 1024], 0
    for _ in range(400):
        noise = torch.randn(5, generator=generator).mul(0.1).exp().tolist()
        fit = clipping_scaling.fit_power(lengths, [t**1.3 * n for t, n in zip(lengths, noise, strict=True)])
        assert fit is not None and fit.low is not None and fit.high is not None
        held += fit.low <= 1.3 <= fit.high
    assert 0.92 < held / 400 < 0.98  # 95 %, give or take three standard errors


def test_too_few_lengths_have_no_interval_or_no_fit():
    two = clipping_scaling.fit_power([8, 16], [1, 2])
    assert two is not None and two.exponent == pytest.approx(1) and two.low is None
    assert "three lengths" in two.growth
    assert clipping_scaling.fit_power([8, 8], [1, 2]) is None
    assert clipping_scaling.fit_power([8, 16], [0, 2]) is None


PHASES = {"forward": 3.0, "backward": 4.0, "norm": 1.0, "clip": 3.0, "communication": 2.3, "noise": 0.5, "step": 0.2}


def test_communication_above_30_percent_of_the_backward_is_flagged_with_its_knob():
    assert clipping_scaling.communication_share(PHASES) == pytest.approx(2.3 / 8)
    assert clipping_scaling.advice(PHASES, "ddp") == []
    slow = {**PHASES, "communication": 2.5}
    (ddp,) = clipping_scaling.advice(slow, "ddp")
    assert "31% of the backward" in ddp and "raise the batch" in ddp
    (fsdp2,) = clipping_scaling.advice(slow, "fsdp2")
    assert "raise max_physical_batch" in fsdp2


@pytest.mark.parametrize(("phase", "knob"), [("norm", "memory_budget"), ("noise", "a larger batch")])
def test_norms_and_noise_have_a_knob_too(phase, knob):
    (line,) = clipping_scaling.advice({**PHASES, phase: 10.0}, "one")
    assert phase in line and knob in line


def test_noisy_figures_say_so():
    assert TimingSpread.of([1.0, 1.0, 2.0, 2.0]).noisy
    assert not TimingSpread.of([1.0, 1.01, 1.02]).noisy
    assert TimingSpread.of([3.0]) == TimingSpread(3.0, 3.0, 3.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_clipping_on_a_gpu_has_the_allocators_memory(capsys, tmp_path):
    options = [part for part in CLIPPING if part != "--cpu"]
    assert main([*options, "--seq-lengths", "16", "32", "--out", str(tmp_path)]) == 0
    assert "reserved" in capsys.readouterr().out
    memory = json.loads((tmp_path / "clipping.json").read_text())["profiles"][0]["private"]["memory"]
    assert memory["reserved"] >= memory["allocated"] > 0 < memory["above"]
