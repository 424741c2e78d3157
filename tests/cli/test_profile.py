"""`gramian profile kfac`: a table of stages that a person can read, and one-line errors."""

import re
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.verify.runs import kfac_profile

TINY = ["profile", "kfac", "--cpu", "--batch-size", "2", "--layers", "1", "--width", "16", "--vocabulary", "32"]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], ["TARGET", "accepted: kfac"]),
        (["everything"], ["'everything'", "unknown", "accepted: kfac"]),
        (["clipping"], ["'clipping'", "not available yet", "accepted: kfac"]),
        (["train"], ["'train'", "not available yet"]),
        (["kfac", "--fsdp"], ["--fsdp", "not available yet", "accepted: gramian profile kfac"]),
        (["kfac", "--mode", "keep"], ["--mode", "'keep'", "not available yet"]),
        (["kfac", "--algorithm", "gram"], ["--algorithm", "'gram'", "not available yet"]),
        (["kfac", "run.toml"], ["CONFIG", "'run.toml'", "not available yet"]),
        (["kfac", "--seq-lengths", "128", "long"], ["--seq-lengths", "'long'", "accepted: an integer of at least 1"]),
        (["kfac", "--batch-size", "0"], ["--batch-size", "'0'", "accepted"]),
        (["kfac", "--width", "30"], ["--width", "30", "accepted: a multiple of heads"]),
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


def test_stages_ratios_and_bytes_are_those_of_the_run():
    config = kfac_profile.model_config(layers=1, width=16, vocabulary=32, context=8)
    calls = []
    found = kfac_profile.profile_kfac(config, 8, 2, torch.device("cpu"), rounds=2, on_progress=lambda: calls.append(1))
    assert [stage.name for stage in found.stages] == ["plain step", "capture", "decompose", "apply"]
    assert found.stages[0].ratio == 1.0
    assert all(stage.seconds >= 0 for stage in found.stages)
    assert found.tokens == 16
    assert 0 < found.factor_bytes < found.used_bytes
    assert len(calls) == kfac_profile.WARM_UP + 2


def test_memory_on_the_cpu_is_that_of_the_process():
    config = kfac_profile.model_config(layers=1, width=16, vocabulary=32, context=8)
    memory = kfac_profile.profile_kfac(config, 8, 2, torch.device("cpu"), rounds=1).stages[0].memory
    assert memory.before is not None and memory.after is not None and memory.peak is not None
    assert 10e6 < memory.before <= memory.peak >= memory.after
    assert memory.reserved is None


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (1024, 16), (96, 4), (64, 4)])
def test_heads_are_64_wide_where_that_fits(width, heads):
    assert kfac_profile.model_config(1, width, 16, 8).heads == heads


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
