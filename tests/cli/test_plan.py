"""`gramian plan`: a table that a person can read, one line that decides, exit codes."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from gramian.cli import main
from gramian.models import GPT
from gramian.privacy.accounting import budget_choices
from gramian.privacy.accounting.budget_choices import Choice, choices
from gramian.privacy.noise.noise_strategy import kind_of
from tests.kit.refusals import refusal

SEVEN = """
[model]
layers = 32
width = 4096
heads = 32
[data]
source = "tokens"
files = ["{folder}/train.bin"]
length = 2048
batch = 64
micro_batch = 4
"""


@pytest.fixture
def seven(tmp_path: Path) -> str:
    """A GPT of seven billion parameters."""
    (tmp_path / "train.bin").touch()
    (tmp_path / "train.json").write_text('{"dtype": "uint16", "vocabulary": 50257, "end": 50256}')
    path = tmp_path / "seven.toml"
    path.write_text(SEVEN.format(folder=tmp_path))
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text("")
    return str(path)


def output(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    captured = capsys.readouterr()
    assert all(character == "\n" or character.isprintable() for character in captured.out)
    return captured.out.rstrip().splitlines(), captured.err


def test_the_decision_is_the_last_line_below_its_arithmetic(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", seven, "--gpus", "8", "--gpu-memory", "141"]) == 0
    lines, errors = output(capsys)
    assert errors == ""
    assert lines[0] == "GPT: 32 blocks, width 4,096, vocabulary 50,257, 6,864,257,024 parameters"
    assert lines[1].startswith("bf16, adamw, micro-batches of 4 × 2,048 tokens, 64 × 2,048 in a step, activations kept")
    assert lines[2] == "planned for 8 GPUs of 141.00 GB (simulated), of which 126.90 GB can be used"
    assert re.search(r"weights +6,864,257,024 × 4 B +27.46 GB +3.43 GB", "\n".join(lines))
    assert re.search(r"optimizer +6,864,257,024 × 2 × 4 B +54.91 GB +6.86 GB", "\n".join(lines))
    assert re.search(r"of 126.90 GB +too much +fits", "\n".join(lines))
    assert re.fullmatch(r"fsdp2: [\d.]+ GB of 126.90 GB on each of 8 GPUs; ddp would need [\d.]+ GB", lines[-1])


def test_what_does_not_fit_exits_1_with_what_would(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", seven, "--gpus", "8", "--gpu-memory", "80"]) == 1
    lines, errors = output(capsys)
    assert "too much" in lines[-1] + lines[-2]
    assert errors.count("\n") == 1
    assert errors.startswith("gramian: plan: nothing fits: fsdp2 needs ")
    for change in ("data.micro_batch=1 ", "parallel.checkpoint_blocks=3 ", "16 GPUs "):
        assert change in errors

    assert main(["plan", seven, "parallel.checkpoint_blocks=3", "--gpus", "8", "--gpu-memory", "80"]) == 0
    lines, _ = output(capsys)
    assert lines[-1].startswith("fsdp2: ")
    assert "recomputed in segments of 3" in lines[1]


def test_copies_in_host_memory_are_counted_for_all_processes_of_a_host(
    seven: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """82.4 GB of weights and AdamW's state, in page-locked pieces; a host of eight GPUs holds 25 of them under DDP."""

    def planned(*told: str) -> tuple[int, str, str]:
        code = main(["plan", seven, *told, "--gpus", "16", "--gpu-memory", "400"])
        lines, errors = output(capsys)
        return code, next((line for line in lines if line.startswith("host memory")), ""), errors

    code, line, _ = planned()
    found = re.fullmatch(
        r"host memory: 3 snapshots and one being written, ([\d.]+) GB each: ([\d.]+) GB on a process, ([\d.]+) GB on a host of "
        r"8 processes",
        line,
    )
    assert code == 0 and found is not None, line
    one, process, host = map(float, found.groups())
    assert 82.4 < one < 1.5 * 82.4
    assert process == pytest.approx(4 * one, abs=0.1) and host == pytest.approx(25 * one, abs=0.5)

    code, line, _ = planned("--host-memory", "2100")
    assert code == 0 and "2 snapshots and one" in line and "checkpoint.snapshots=3 would take too much" in line
    code, _, errors = planned("--host-memory", "1000")
    assert code == 1 and errors.count("\n") == 1
    assert errors.startswith("gramian: plan: checkpoint.snapshots: not even 2 and the one being written fit: ")
    assert planned("parallel.strategy=fsdp2", "--host-memory", "1000")[0] == 0
    assert planned("--host-memory", "1000", "--gpus-per-host", "4")[0] == 0


def test_a_strategy_of_the_config_is_planned_as_it_is(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", seven, "parallel.strategy=ddp", "--gpus", "8", "--gpu-memory", "141"]) == 1
    lines, errors = output(capsys)
    assert "parallel.strategy=ddp does not fit" in errors
    assert "parallel.strategy=auto" in errors
    assert not any("fsdp2" in line for line in lines)


def test_no_model_is_built(seven: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "__init__", lambda self, *given: pytest.fail("a model was built"))
    main(["plan", seven, "--gpus", "1", "--gpu-memory", "80"])
    main(["plan", seven, "--gpus", "8", "--gpu-memory", "80"])
    output(capsys)


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_cpu_is_planned_for_and_said_to_be(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", small]) == 0
    lines, _ = output(capsys)
    assert lines[1].startswith("fp32, ")
    assert lines[2].startswith("planned for the CPU of this machine, ")
    assert lines[2].endswith("no GPU is here: --gpus and --gpu-memory plan for some")
    assert re.fullmatch(r"one: [\d.]+ MB of [\d.]+ GB on the CPU", lines[-1])

    assert main(["plan", small, "run.device=cpu"]) == 0
    assert output(capsys)[0][2].endswith("can be used")
    assert main(["plan", small, "model.kind=goose"]) == 0
    assert output(capsys)[0][0].startswith("Goose: ")
    assert main(["plan", small, "--gpus", "2"]) == 2
    assert "--gpu-memory: none given and no GPU is here; expected gigabytes" in output(capsys)[1]


@pytest.mark.parametrize("major, precision", [(7, "fp16"), (9, "bf16")])
def test_the_gpus_of_the_machine_are_the_default(
    small: str, major: int, precision: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [SimpleNamespace(major=9, minor=0, total_memory=80 * 10**9)]
    cards.append(SimpleNamespace(major=major, minor=5, total_memory=40 * 10**9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    assert main(["plan", small]) == 0
    lines, _ = output(capsys)
    assert lines[1].startswith(f"{precision}, ")
    assert lines[2] == "planned for 2 GPUs of 40.00 GB, of which 36.00 GB can be used"
    assert lines[-1].startswith("ddp: ")
    assert main(["plan", small, "--gpus", "16"]) == 0
    assert "16 GPUs of 40.00 GB (simulated)" in output(capsys)[0][2]
    assert main(["plan", small, "--gpu-memory", "10"]) == 0
    assert "2 GPUs of 10.00 GB (simulated)" in output(capsys)[0][2]


# ---- what is said, what is refused -----------------------------------------------------------------------------------


def test_curvature_has_a_table_of_its_own(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", small, "kfac.update_freq=5"]) == 0
    lines = output(capsys)[0]
    assert any(line.startswith("K-FAC on top of that, for a refresh of ") for line in lines)
    assert any(re.match(r"cpu: [\d.]+ MB at most; [\d.]+ MB in the first refresh", line) for line in lines)
    assert any(line.startswith("blocks.0.fc and ") for line in lines)
    assert re.match(r"with K-FAC: [\d.]+ MB \+ [\d.]+ MB of ", lines[-1])


def test_a_run_that_fits_alone_may_not_fit_with_its_curvature(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(gigabytes: float, *overrides: str) -> int:
        return main(["plan", "--gpus", "1", "--gpu-memory", str(gigabytes), small, *overrides])

    assert planned(1, "kfac.update_freq=5") == 0
    held, curvature = (float(size) / 1e3 for size in re.findall(r"([\d.]+) MB", output(capsys)[0][-1])[:2])
    between = (held + 0.9 * curvature) / 0.9  # of a GPU nine tenths can be used
    assert planned(between) == 0
    output(capsys)
    assert planned(between, "kfac.update_freq=5") == 1
    lines, errors = output(capsys)
    assert any(line.startswith("K-FAC on top") for line in lines)
    assert "with K-FAC" in errors and "would fit: kfac.memory_budget = " in errors and errors.count("\n") == 1
    assert planned(between, f"kfac.memory_budget={errors.rsplit(' = ', 1)[1].strip()}") == 0


@pytest.mark.parametrize(
    "argv, names",
    [
        (["plan"], ["CONFIG"]),
        (["plan", "/none.toml"], ["/none.toml", "cannot be read"]),
        (["plan", "{small}", "run.stps=3"], ["run.stps", "did you mean run.steps?"]),
        (["plan", "{small}", "--gpus", "0"], ["--gpus", "'0'", "expected an integer of at least 1"]),
        (["plan", "{small}", "--gpu-memory", "much"], ["--gpu-memory", "'much'", "expected gigabytes above 0"]),
        (["plan", "{small}", "--gpu-memory", "nan"], ["--gpu-memory", "'nan'", "expected"]),
        (["plan", "{small}", "--gpu", "3"], ["--gpu", "expected"]),
        (["plan", "{small}", "model.kind=huggingface", "model.path=/none"], ["model.path", "/none", "config.json"]),
        (["plan", "{small}", "data.tokenizer=/none"], ["data.tokenizer", "/none"]),
    ],
)
def test_bad_input_exits_2_with_one_line(
    argv: list[str], names: list[str], small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(small=small) for part in argv]) == 2
    lines, errors = output(capsys)
    assert lines == []
    assert errors.count("\n") == 1
    for name in names:
        assert name in errors


def test_overrides_may_stand_behind_options(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for argv in (
        ["data.batch=16", "--gpus", "1", "--gpu-memory", "8"],
        ["--gpus", "1", "--gpu-memory", "8", "data.batch=16"],
    ):
        assert main(["plan", small, *argv]) == 0
        said.append(output(capsys))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "override, row, line",
    [
        (
            "data.batch=16",
            r"row proof +12 runs of 16 × 128 tokens",
            r"row proof.*: 12 forwards .* and 48 for the loss; .*host",
        ),
        (
            "data.batch=32",
            r"row proof +14 runs of 32 × 128 tokens",
            r"row proof.*: 14 forwards .* and 14 for the loss; .*host",
        ),
        ("privacy.proof=off", "", 'row proof: "off", as privacy.proof says'),
        ("data.micro_batch=1", "", "row proof: not needed, a backward has one window"),
    ],
)
def test_a_private_run_is_planned_with_its_row_proof(
    override: str, row: str, line: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", small, "privacy.noise_multiplier=1.0", override]) == 0
    lines, _ = output(capsys)
    assert bool(re.search(r" row proof ", "\n".join(lines))) == bool(row) and re.search(row, "\n".join(lines))
    assert any(re.match(line, found) for found in lines)


@pytest.mark.full
def test_what_a_privacy_budget_buys_is_that_of_an_independent_accountant(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "data.limit_bytes=200000",
        "data.length=64",
        "data.batch=16",
        "run.steps=200",
        "privacy.accountant=rdp",
    ]
    overrides.append("privacy.noise_multiplier=1.0")
    assert main(["plan", small, "--target-epsilon", "3", *overrides]) == 0
    shown = capsys.readouterr().out
    records = int(re.search(r"ε = 3 at δ = 1e-05 for ([\d,]+) windows", shown)[1].replace(",", ""))  # type: ignore[index]
    rows = re.findall(r"^.*? (\d+) +([\d,]+) +([\d.]+) +([\d.e-]+) +([\d.e-]+) +([\d.]+) ×", shown, re.M)
    assert len(rows) == 11
    for batch, steps, sigma, step_noise, total_noise, cost in [
        [float(x.replace(",", "")) for x in row] for row in rows[::4]
    ]:
        accountant = RdpAccountant()
        step = PoissonSampledDpEvent(batch / records, GaussianDpEvent(sigma))
        epsilon = accountant.compose(SelfComposedDpEvent(step, int(steps))).get_epsilon(1e-5)
        assert epsilon == pytest.approx(3, rel=0.03)  # σ is shown with three digits
        assert step_noise == pytest.approx(sigma / batch, rel=0.06)
        assert total_noise == pytest.approx(sigma / batch / steps**0.5, rel=0.06)
        assert cost == pytest.approx(batch * steps / (16 * 200), rel=0.06)
    assert "least noise for the samples of this config: data.batch=128 run.steps=25" in shown


def test_a_budget_that_is_none_is_one_line(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", small, "--target-epsilon", "-1"]) == 2
    assert "expected an ε above 0" in capsys.readouterr().err


def test_batches_that_do_not_go_with_correlated_noise_are_left_out_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_choices, "find_noise_multiplier", lambda *given: 1.0)

    def at(size: int, count: int) -> tuple[Any, ...]:
        return kind_of("bandmf", 3, size / 60)

    found = choices(6.0, 1e-5, 60, 8, 6, "rdp", at)
    assert [[choice.batch for choice in some] for some in found] == [[2, 4, 8, 16], [2, 4, 16]]
    with refusal("^bands: "):
        choices(6.0, 1e-5, 60, 32, 6, "rdp", at)


def test_a_budget_is_that_of_truncated_draws(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def chosen(epsilon: float, delta: float, records: int, *rest: Any) -> Any:
        asked.extend((records, rest[-1]))
        return [[Choice(16, 3, 1.0)], []]

    monkeypatch.setattr(budget_choices, "choices", chosen)
    sizes = ["data.limit_bytes=200000", "data.length=64", "data.batch=16", "run.steps=200"]
    options = ["privacy.noise_multiplier=1.0", "privacy.accountant=pld", "privacy.max_draw=20"]
    assert main(["plan", small, "--target-epsilon", "3", *sizes, *options]) == 0
    records, kind = asked
    assert kind(16, 200) == kind(4, 800) == (records, 20)
    with refusal(r"^privacy.max_draw: is 20; expected at least data.batch \(32\)"):
        kind(32, 100)
