"""The doctor: a healthy run is green, and every bug that is put into it turns its own check red."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.data import StepBatch, Windows, load_windows
from gramian.models.gpt import GPT, GPTBlock, GPTConfig
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config, parse_config
from gramian.train.config.config_sections import ModelSection
from gramian.train.doctor import examine
from gramian.train.doctor.check import Check
from gramian.train.doctor.checks import schedule_end
from gramian.train.doctor.checks.causality import causality
from gramian.train.doctor.checks.curvature_coverage import curvature_coverage
from gramian.train.doctor.checks.device_memory import planned
from gramian.train.doctor.checks.gradient_check import gradients
from gramian.train.doctor.checks.graph_breaks import find_breaks, graph_breaks
from gramian.train.doctor.checks.initial_loss import initial_loss
from gramian.train.doctor.checks.overfit import overfit
from gramian.train.doctor.checks.private_windows import private_windows
from gramian.train.doctor.checks.scalar_reach import scalar_reach
from gramian.train.doctor.checks.split_invariance import shortened, split, split_invariance, unequal
from gramian.train.doctor.checks.target_tokens import target_tokens
from gramian.train.doctor.examined_run import ExaminedRun, rows_of, without_dropout
from gramian.train.loop.objective import IGNORED, Objective, logits_of
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.precision import Precision, resolve_precision
from gramian.train.loop.stepper import seed_all

SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 100, "device": "cpu"},
    "model": {"layers": 2, "width": 32, "heads": 2},
    "data": {"length": 24, "batch": 8, "limit_bytes": 200_000, "workers": 0},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup": 5},
    "doctor": {"overfit_steps": 120, "overfit_windows": 2},
}
CPU = torch.device("cpu")


def config_of(**told: dict[str, Any]) -> Config:
    return parse_config({name: SMALL.get(name, {}) | told.get(name, {}) for name in {**SMALL, **told}})


@pytest.fixture(scope="module")
def windows() -> Windows:
    return load_windows(config_of().data)[0]


def subject_of(
    windows: Windows, change: Callable[[GPT], None] = lambda model: None, **told: dict[str, Any]
) -> ExaminedRun:
    """The small run, its model changed."""
    config = config_of(**told)

    def make() -> nn.Module:
        model = build_model(config, windows.vocabulary)
        assert isinstance(model, GPT)
        change(model)
        return model

    return ExaminedRun(config, resolve_precision(config.precision, CPU), ProcessGrid(0, 1, CPU, "one"), windows, make)


# ---- a healthy run ---------------------------------------------------------------------------------------------------


def test_a_healthy_run_is_green(windows: Windows) -> None:
    told: list[tuple[int, int, str]] = []
    checks = examine.examine(config_of(), on_progress=lambda *progress: told.append(progress))
    assert [check.name for check in checks if not check.ok] == []
    assert [check.name for check in checks] == [
        "schedule", "data: empty documents", "data: repeated documents", "data: validation documents trained on",
        "data: windows", "memory", "host memory", "scalars", "targets", "objective", "initial loss", "initial logits",
        "graph breaks", "gradients", "causality", "rows apart", "micro-batches", "time", "overfit",
    ]  # fmt: skip
    assert all(0 <= done <= total for done, total, _ in told)
    assert any("overfit: loss" in what for *_, what in told)
    assert all("\n" not in text for check in checks for text in (check.measured, check.threshold, check.hint))


@pytest.mark.parametrize(
    "told",
    [
        {"model": {"tied": True, "dropout": 0.3}},
        pytest.param({"precision": {"kind": "bf16"}}, marks=pytest.mark.full),
        pytest.param({"precision": {"kind": "fp16"}}, marks=pytest.mark.full),
        {"precision": {"kind": "fp64"}, "parallel": {"checkpoint_blocks": 1}},
        {"data": {"isolate": True, "micro_batch": 3}},
        {"data": {"pack": False, "batch": 1}},
        {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "implementation": "loop"}},
    ],
    ids=str,
)
def test_other_healthy_runs_are_green(told: dict[str, dict[str, Any]]) -> None:
    # Learning by heart is not what is different in them, but under SGD.
    steps = 120 if "optimizer" in told else 1
    checks = examine.examine(config_of(**told, doctor={"overfit_steps": steps}))
    assert [check.name for check in checks if not check.ok] == ([] if steps > 1 else ["overfit"])


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    before = torch.random.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    examine.examine(config_of(doctor={"overfit_steps": 1}))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.are_deterministic_algorithms_enabled() == before[1]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_crashes_is_a_failed_check() -> None:
    def make() -> nn.Module:
        model = GPT(GPTConfig(vocabulary=257, context=24, layers=1, width=32, heads=2))
        model.blocks[0].fc = nn.Linear(31, 128)
        return model

    checks = examine.examine(config_of(doctor={"overfit_steps": 1}), make=make)
    crashed = {check.name for check in checks if check.measured == "crashed"}
    assert {"initial loss", "gradients", "overfit"} <= crashed
    assert all("\n" not in check.hint for check in checks)


def test_a_gpu_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GramianError, match="run.device: there is no CUDA device here"):
        examine.examine(config_of(run={"device": "cuda"}))


# ---- targets and loss ------------------------------------------------------------------------------------------------


def test_labels_that_are_not_shifted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Windows.stack

    def not_shifted(self: Windows, index: Any) -> dict[str, Tensor]:
        rows = stack(self, index)
        return rows | {"targets": torch.where(rows["targets"] == IGNORED, IGNORED, rows["tokens"])}

    monkeypatch.setattr(Windows, "stack", not_shifted)
    found = {check.name: check for check in examine.examine(config_of(doctor={"overfit_steps": 1}))}
    assert not found["targets"].ok
    assert found["targets"].value > 0.5


def test_padding_that_counts_is_found(windows: Windows) -> None:
    subject = subject_of(windows)
    batch = subject.batches[0]

    def targets_fit(**changed: Any) -> bool:
        subject.batches = [dataclasses.replace(batch, **changed)]
        return target_tokens(subject)[0].ok

    assert targets_fit()
    assert not targets_fit(tokens=batch.tokens + 1)
    padded = {name: values.clone() for name, values in batch.micro[0].items()}
    padded["targets"][:, -4:] = 0
    padded["tokens"][:, -3:] = 7  # zeros as targets where the text goes on with something else
    assert not targets_fit(micro=[padded, *batch.micro[1:]])


def test_a_loss_that_is_shifted_twice_is_found(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Objective.forward

    def shifted(self: Objective, tokens: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return forward(self, tokens, targets.roll(-1, dims=1), *rest)

    assert outcome(initial_loss(subject_of(windows)), "objective")
    monkeypatch.setattr(Objective, "forward", shifted)
    assert not outcome(initial_loss(subject_of(windows)), "objective")


def as_loaded(subject: ExaminedRun) -> ExaminedRun:
    """The same run, its weights said to come from a folder."""
    model = ModelSection(kind="huggingface", path="a folder")
    return dataclasses.replace(subject, config=dataclasses.replace(subject.config, model=model))


def outcome(checks: list[Check], name: str) -> bool:
    return next(check for check in checks if check.name == name).ok


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tied", [False, True])
def test_fresh_models_start_where_they_should(windows: Windows, tied: bool, seed: int) -> None:
    told = {"model": {"tied": tied, "width": 128}, "run": {"seed": seed}}
    assert all(check.ok for check in initial_loss(subject_of(windows, **told)))


def test_initial_weights_of_a_wrong_scale_are_found(windows: Windows) -> None:
    def wide(model: GPT) -> None:
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))

    def wider(model: GPT) -> None:
        nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(4))

    checks = initial_loss(subject_of(windows, wide))
    assert not outcome(checks, "initial loss") and not outcome(checks, "initial logits")
    # The loss is what these logits say it should be; the logits are not.
    checks = initial_loss(subject_of(windows, wider))
    assert outcome(checks, "initial loss") and not outcome(checks, "initial logits")


def test_a_model_that_begins_with_an_opinion_is_found(windows: Windows) -> None:
    def biased(model: GPT) -> None:
        model.head.bias = nn.Parameter(torch.zeros(257))
        model.head.bias.data[3] = 8.0

    assert not outcome(initial_loss(subject_of(windows, biased)), "initial loss")


def test_a_loaded_model_is_better_than_none(windows: Windows) -> None:
    subject = as_loaded(subject_of(windows))
    assert "below ln V" in initial_loss(subject)[-1].threshold
    for _ in range(20):
        subject.trial_stepper.take(subject.batches[0], 1e-2)
    assert outcome(initial_loss(subject), "initial loss")

    def lost(model: GPT) -> None:
        nn.init.normal_(model.head.weight)

    assert not outcome(initial_loss(as_loaded(subject_of(windows, lost))), "initial loss")


# ---- learning --------------------------------------------------------------------------------------------------------


def detached(model: GPT) -> None:
    """Features without a graph: nothing below the last block learns."""
    model.blocks[-1].register_forward_hook(lambda module, given, out: out.detach())


def test_windows_are_learnt_by_heart(windows: Windows) -> None:
    (check,) = overfit(subject_of(windows))
    assert check.ok and check.value < 0.1
    assert "lr 0.003" in check.measured and not check.hint


def test_a_rate_for_long_runs_gives_way_to_a_higher_one(windows: Windows) -> None:
    (check,) = overfit(subject_of(windows, optimizer={"lr": 1e-6}))
    assert check.ok
    assert "lr 0.003" in check.measured
    assert "not at optimizer.lr = 1e-06" in check.hint


def test_a_model_that_cannot_learn_by_heart_is_found(windows: Windows) -> None:
    (check,) = overfit(subject_of(windows, detached, doctor={"overfit_windows": 8, "overfit_steps": 40}))
    assert not check.ok
    assert check.value > 1


# ---- gradients -------------------------------------------------------------------------------------------------------


def looked_at(subject: ExaminedRun) -> Check:
    return gradients(subject)[0]


def test_detached_features_are_found(windows: Windows) -> None:
    check = looked_at(subject_of(windows, detached))
    assert not check.ok
    assert "gradient of blocks.0.qkv.weight: none" in check.details
    assert "gradient of token_embedding.weight: none" in check.details
    assert not any("final_norm" in line for line in check.details)


def test_a_dead_parameter_is_found_and_a_frozen_one_is_not(windows: Windows) -> None:
    def with_factor(power: float, trained: bool = True) -> Callable[[GPT], None]:
        def change(model: GPT) -> None:
            model.alpha = nn.Parameter(torch.zeros(()), requires_grad=trained)
            model.register_forward_hook(lambda module, given, out: out + 1e-3 * module.alpha**power)

        return change

    assert looked_at(subject_of(windows)).ok
    assert looked_at(subject_of(windows, with_factor(0.0))).details == ("gradient of alpha: zero",)
    assert looked_at(subject_of(windows, with_factor(0.5))).details == ("gradient of alpha: not finite",)
    assert looked_at(subject_of(windows, with_factor(0.5, trained=False))).ok

    def unused(model: GPT) -> None:
        model.beta = nn.Parameter(torch.zeros(3))

    check = looked_at(subject_of(windows, unused))
    assert check.details == ("gradient of beta: none",)
    assert "beta (none)" in check.hint


def test_a_gate_that_starts_at_zero_is_no_fault(windows: Windows) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = nn.Linear(32, 32), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.inner(x)

    def gated(model: GPT) -> None:
        model.final_norm = nn.Sequential(model.final_norm, Gated())  # type: ignore[assignment]

    assert looked_at(subject_of(windows, gated)).ok


# ---- what sees what --------------------------------------------------------------------------------------------------


class TimeNorm(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return (x_BTD - x_BTD.mean(1, keepdim=True)) / (x_BTD.std(1, keepdim=True) + 1e-3)


class BatchMean(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD - 0.1 * x_BTD.mean(0, keepdim=True)


class FeatureNorm(nn.BatchNorm1d):
    """Over the features of all tokens of a batch, in training; in evaluation it has nothing to leak."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD.transpose(1, 2)).transpose(1, 2)


def leaks(subject: ExaminedRun) -> dict[str, bool]:
    subject.trial_stepper.take(subject.batches[0], 1e-3)
    return {check.name: not check.ok for check in causality(subject)}


def without_mask(model: GPT) -> None:
    everything = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    for block in model.blocks:
        block.forward = lambda x, sees=None, block=block: GPTBlock.forward(block, x, everything)  # type: ignore[assignment]


def before_blocks(layer: Callable[[], nn.Module]) -> Callable[[GPT], None]:
    def change(model: GPT) -> None:
        model.embedding_dropout = nn.Sequential(layer())  # type: ignore[assignment]

    return change


def sees_target(model: GPT) -> None:
    model.register_forward_pre_hook(lambda module, given: (given[0].roll(-1, dims=1), *given[1:]))


@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "change, time, rows",
    [
        (lambda model: None, False, False),
        (without_mask, True, False),
        (before_blocks(TimeNorm), True, False),
        (sees_target, True, False),
        (before_blocks(BatchMean), False, True),
        (before_blocks(lambda: FeatureNorm(32)), True, True),
    ],
    ids=["healthy", "no mask", "norm over time", "sees its target", "mean over rows", "batch norm"],
)
def test_what_is_seen_too_early_is_found(
    windows: Windows, change: Callable[[GPT], None], time: bool, rows: bool, kind: str
) -> None:
    assert leaks(subject_of(windows, change, precision={"kind": kind})) == {"causality": time, "rows apart": rows}


def test_one_token_ahead_is_found_by_every_cut(windows: Windows) -> None:
    def ahead(model: GPT) -> None:
        def blend(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            return out + 1e-3 * out.roll(-1, dims=1)

        model.token_embedding.register_forward_hook(blend)

    assert leaks(subject_of(windows, ahead)) == {"causality": True, "rows apart": False}


def test_a_model_that_does_not_look_is_found(windows: Windows) -> None:
    def blind(model: GPT) -> None:
        model.register_forward_pre_hook(lambda module, given: (torch.zeros_like(given[0]), *given[1:]))

    checks = causality(subject_of(windows, blind))
    assert all(not check.ok and "do not depend on the tokens" in check.hint for check in checks)


def test_dropout_is_off_everywhere() -> None:
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=1, width=32, heads=2, dropout=0.5)).train()
    tokens = torch.arange(16)[None]
    assert not torch.equal(model(tokens), model(tokens))
    without_dropout(model)
    assert torch.equal(model(tokens), model(tokens))


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def invariant(subject: ExaminedRun, stepper: type[PlainStepper] = PlainStepper) -> Check:
    plain = subject.stepper(subject.model())
    subject.trial_stepper = stepper(plain.module, plain.optimizer, plain.numbers, plain.grid, max_norm=1.0, seed=0)
    return split_invariance(subject)[0]


class MeanOfMeans(PlainStepper):
    """Divides each micro-batch by its own tokens, and by the number of micro-batches."""

    def _backward(self, batch: StepBatch, coefficient: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro:
            count = int((micro["targets"] != IGNORED).sum())
            with self.numbers.autocast():
                loss, nats = self.module(micro["tokens"], micro["targets"], 1 / count / len(batch.micro))
            loss.backward()
            total += nats
        return total


class Forgets(PlainStepper):
    """Goes back from the last micro-batch alone."""

    def _backward(self, batch: StepBatch, coefficient: float) -> Tensor:
        return super()._backward(dataclasses.replace(batch, micro=batch.micro[-1:]), coefficient)


@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.full), "fp64"])
def test_accumulation_that_is_wrong_for_unequal_windows_is_found(windows: Windows, kind: str) -> None:
    subject = subject_of(windows, precision={"kind": kind})
    assert invariant(subject).ok
    assert not invariant(subject, MeanOfMeans).ok
    assert not invariant(subject, Forgets).ok


def test_float32_gradients_agree_to_a_millionth(windows: Windows) -> None:
    check = invariant(subject_of(windows))
    assert (check.threshold, check.ok) == ("1e-06", True)


def test_wrong_accumulation_is_found_in_a_whole_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainStepper, "_backward", MeanOfMeans._backward)
    checks = examine.examine(config_of(doctor={"overfit_steps": 1}))
    assert "micro-batches" in {check.name for check in checks if not check.ok}


def test_windows_are_cut_to_what_the_run_holds_and_count_unequally() -> None:
    tokens = torch.arange(16 * 32).view(16, 32)
    rows = {"tokens": tokens, "targets": tokens + 1}
    assert shortened(rows, 16)["tokens"].shape == (16, 32)
    assert shortened(rows, 4)["tokens"].shape == (16, 8)
    assert shortened(rows, 1)["tokens"].shape == (16, 4)
    counted = (unequal(rows)["targets"] != IGNORED).sum(1)
    assert counted.tolist() == [2 * row for row in range(1, 17)]
    batch = split(unequal(rows), 4)
    assert [len(micro["tokens"]) for micro in batch.micro] == [4] * 4
    assert batch.tokens == int(counted.sum())


# ---- graph breaks ----------------------------------------------------------------------------------------------------


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum().item()  # line of the first break
        print("", end="")
        if x.mean() > 100:
            x = x * scale
        return x + torch.tensor(np.random.default_rng(0).random())


@pytest.mark.full
def test_graph_breaks_are_listed_with_their_place_and_fix(windows: Windows) -> None:
    def breaking(model: GPT) -> None:
        model.final_norm = Breaking()  # type: ignore[assignment]

    subject = subject_of(windows, breaking, compile={"mode": "default"})
    (check,) = graph_breaks(subject)
    assert not check.ok and check.value >= 4
    first = Breaking.forward.__code__.co_firstlineno + 1
    expected = {0: ".item()", 1: "remove print", 2: "torch.where", 4: "NumPy"}
    for offset, fix in expected.items():
        line = next(line for line in check.details if f"{Path(__file__).name}:{first + offset}:" in line)
        assert fix in line
    assert len(check.details) == len(set(check.details)) == check.value


def test_the_reference_model_is_one_graph_and_off_is_not_looked_at(
    windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(windows)
    rows = rows_of(subject.batch(2))
    assert find_breaks(subject.model(), rows["tokens"], None, subject.numbers) == ()
    (check,) = graph_breaks(subject)
    assert (check.measured, check.ok) == ("not compiled", True)


# ---- schedule, scalars, memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_a_schedule_that_ends_elsewhere_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(schedule={"kind": kind, "floor": 1e-6})
    assert schedule_end.schedule_end(config)[0].ok
    monkeypatch.setattr(schedule_end, "learning_rate", lambda *given: 1.5e-3)  # "decays to a half"
    assert not schedule_end.schedule_end(config)[0].ok


def with_scalar(model: GPT) -> None:
    model.temperature = nn.Parameter(torch.tensor(2.0))
    model.offset = nn.Parameter(torch.zeros(1))


def test_a_rate_that_cannot_move_a_scalar_is_found(windows: Windows) -> None:
    subject = subject_of(windows, with_scalar, run={"steps": 500}, optimizer={"lr": 1e-3})
    assert scalar_reach(subject)[0].ok  # Σ lr is about a quarter
    slow = subject_of(windows, with_scalar, run={"steps": 500}, optimizer={"lr": 1e-4})
    (check,) = scalar_reach(slow)
    assert not check.ok
    assert check.value == pytest.approx(1e-4 * (500 - 5) / 2 + 1e-4 * 3, rel=0.01)
    assert "temperature" in check.hint and "offset" not in check.hint
    assert any(line.startswith("temperature = 2: moves by at most about 0.025") for line in check.details)


def test_without_adam_nobody_knows_how_far_a_scalar_moves(windows: Windows) -> None:
    (check,) = scalar_reach(subject_of(windows, with_scalar, optimizer={"kind": "sgd", "lr": 1e-6}))
    assert check.ok and len(check.details) == 2
    assert "depends on their gradients" in check.hint
    assert scalar_reach(subject_of(windows))[0].details == ()


def test_memory_that_does_not_fit_is_found() -> None:
    config, numbers = config_of(model={"layers": 12, "width": 768, "heads": 12}), Precision("bf16", "cuda")
    assert planned(config, 50257, numbers, 1, 80 * 10**9).ok
    check = planned(config, 50257, numbers, 1, 10**9)
    assert not check.ok and check.value > 1e9
    assert "would fit" in check.hint
    # Several of them hold what one does not.
    several = planned(config, 50257, numbers, 8, 2 * 10**9)
    assert several.ok and "torchrun --nproc_per_node=8" in several.hint


# ---- data ------------------------------------------------------------------------------------------------------------


def write_jsonl(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


TEXTS = [f"document number {index}" for index in range(400)]


def data_failures(path: str, source: str = "jsonl") -> set[str]:
    checks = examine.examine(config_of(data={"source": source, "files": [path]}, doctor={"overfit_steps": 1}))
    return {check.name for check in checks if not check.ok and check.name.startswith("data")}


def test_empty_and_repeated_documents_and_cut_off_files_are_found(tmp_path: Path) -> None:
    assert data_failures(write_jsonl(tmp_path / "a.jsonl", TEXTS)) == set()
    assert data_failures(write_jsonl(tmp_path / "a.jsonl", TEXTS + [""] * 50)) == {"data: empty documents"}
    assert data_failures(write_jsonl(tmp_path / "a.jsonl", TEXTS + TEXTS[:50])) == {"data: repeated documents"}


def test_a_file_that_cannot_be_read_because_it_is_cut_off_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(5000, dtype=np.uint16) % 256)
    path.write_bytes(path.read_bytes()[:3000])
    assert data_failures(str(path), "tokens") == {"data: files cut off"}


def test_missing_data_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="none.jsonl"):
        data_failures(str(tmp_path / "none.jsonl"))


# ---- [privacy] and [kfac] --------------------------------------------------------------------------------------------


def test_private_windows_must_not_depend_on_each_other(windows: Windows) -> None:
    told = {"privacy": {"target_epsilon": 3.0}, "model": {"layers": 1}}
    assert [check.ok for check in private_windows(subject_of(windows, **told))] == [True, True]
    for check in private_windows(subject_of(windows, before_blocks(BatchMean), **told)):
        assert not check.ok
        assert "changes when other samples are replaced" in check.hint and "\n" not in check.hint


@pytest.mark.parametrize(
    "keys, data, measured",
    [
        ({}, {"batch": 6}, "proven, 10 runs of 6 windows"),
        ({}, {"batch": 6, "micro_batch": 4}, "proven, 8 runs of 4 windows"),
        ({"proof": "off"}, {"batch": 6}, "off"),
        ({}, {"micro_batch": 1}, "one sample a batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:proof:UserWarning")
def test_the_row_proof_passes_on_the_first_batch_or_is_said_not_to_run(
    keys: dict[str, Any], data: dict[str, Any], measured: str, windows: Windows
) -> None:
    told = {"privacy": {"noise_multiplier": 1.0, **keys}, "model": {"layers": 1}, "data": data}
    check = private_windows(subject_of(windows, **told))[0]
    assert (check.name, check.measured, check.ok) == ("row proof", measured, True)
    assert ("taken from shapes" in check.hint) == (measured == "off")


def test_curvature_covers_every_parameter_or_names_it(windows: Windows) -> None:
    assert curvature_coverage(subject_of(windows, kfac={}))[0].ok
    (check,) = curvature_coverage(subject_of(windows, optimizer={"kind": "kfac"}))
    assert check.ok and check.measured.startswith("0 of ")

    def unused(model: GPT) -> None:
        model.spare = nn.Linear(4, 4)

    (check,) = curvature_coverage(subject_of(windows, unused, kfac={}))
    assert not check.ok
    assert check.details == ("no curvature of spare.weight", "no curvature of spare.bias")


@pytest.mark.parametrize("section", [{"kfac": {}}, {"privacy": {"noise_multiplier": 1.0}}], ids=["kfac", "privacy"])
def test_sections_are_examined_where_they_are_there(section: dict[str, Any]) -> None:
    checks = examine.examine(config_of(**section, doctor={"overfit_steps": 1}))
    assert [check.name for check in checks if not check.ok] == ["overfit"]
    assert {"curvature", "private windows"} & {check.name for check in checks}


def test_curvature_of_a_private_run_comes_from_public_data(tmp_path: Path, windows: Windows) -> None:
    (tmp_path / "public.txt").write_text("nobody minds that this is read. " * 50)
    told = {"privacy": {"noise_multiplier": 1.0}, "kfac": {"public_files": [str(tmp_path / "public.txt")]}}
    assert curvature_coverage(subject_of(windows, **told))[0].ok
    told["kfac"]["public_files"] = [str(tmp_path / "none.txt")]
    with pytest.raises(GramianError, match="kfac.public_files"):
        examine.examine(config_of(**told))


def test_natural_steps_learn_by_heart_where_plain_ones_do_not(windows: Windows) -> None:
    told = {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}, "doctor": {"overfit_steps": 25}}
    (plain,), (natural,) = overfit(subject_of(windows, **told)), overfit(subject_of(windows, **told, kfac={}))
    assert natural.ok and not plain.ok


def test_the_optimizer_kfac_learns_by_heart(windows: Windows) -> None:
    (check,) = overfit(subject_of(windows, optimizer={"kind": "kfac", "lr": 4e-3}, doctor={"overfit_steps": 60}))
    assert check.ok, check.measured


def test_what_a_section_refuses_is_a_failed_check_with_its_words() -> None:
    def make() -> nn.Module:
        model = GPT(GPTConfig(vocabulary=257, context=24, layers=1, width=32, heads=2))
        model.final_norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(32), nn.Unflatten(0, (-1, 24)))  # type: ignore[assignment]
        return model

    checks = examine.examine(config_of(privacy={"noise_multiplier": 1.0}, doctor={"overfit_steps": 1}), make=make)
    check = next(check for check in checks if check.name == "private windows")
    assert not check.ok and "BatchNorm" in check.hint


# ---- Hugging Face models ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_hugging_face_model_is_examined(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    told = {"kind": "huggingface", "path": str(tmp_path)}
    data = {"tokenizer": "bytes"}
    fresh = examine.examine(config_of(model=told | {"fresh": True}, compile={"mode": "default"}, data=data))
    assert [check.name for check in fresh if not check.ok] == []

    def make() -> nn.Module:
        model = transformers.GPT2LMHeadModel(shape)
        seed_all(0)
        nn.init.normal_(model.lm_head.weight)
        return model

    # As if the weights in the folder were not those of its tokenizer.
    loaded = examine.examine(config_of(model=told, doctor={"overfit_steps": 1}, data=data), make=make)
    assert not outcome(loaded, "initial loss")


def test_dropout_of_a_hugging_face_model_is_off() -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    shape.attention_dropout = 0.5
    model = transformers.LlamaForCausalLM(shape).train()
    tokens = torch.arange(16)[None]
    assert not torch.equal(logits_of(model, tokens), logits_of(model, tokens))
    without_dropout(model)
    assert torch.equal(logits_of(model, tokens), logits_of(model, tokens))
