"""Distillation in the training loop: what a hand-written loop does, from whatever source, cut and resumed as you like."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramian.cli import main
from gramian.data import load_windows
from gramian.data.window_order import windows_at
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.loss.temperature import STUCK_STEPS, Temperature
from gramian.train.build.build_model import build_model
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.state.saved_run import load_run
from gramian.verify.resume import Kill, check_resume, random_kills
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import RED, Edit, Swap
from tests.train.distilled import LEARNED, cache_of, evaluations, metrics, student, teacher_run, validating
from tests.train.runs import ONE, events, run

pytestmark = pytest.mark.xdist_group("distill")

ADVERSARIAL: dict[str, Any] = {"temperature_kind": "adversarial", "temperature_rate": 0.5, "temperature_free": 0.0}
HIDDEN: dict[str, Any] = {"features": "hidden", "feature_pairs": [[0, 0], [2, 1]], "feature_weight": 0.3}


# ---- a loop that was written by hand -------------------------------------------------------------------------------------


def streams(model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and what enters the first block and leaves each."""
    found: list[Tensor] = []
    first, *_ = blocks = list(model.blocks)  # type: ignore[arg-type]
    hooks = [first.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))]
    hooks += [block.register_forward_hook(lambda module, inputs, out: found.append(out)) for block in blocks]
    logits_BTV = model(tokens_BT)
    for hook in hooks:
        hook.remove()
    return logits_BTV, found


def by_hand(config: Config, steps: int) -> list[dict[str, float]]:
    """T² KL + CE + features in plain torch, AdamW, clipping, and T by its own rule; nothing of `gramian.distill`."""
    told = config.teacher
    assert told is not None
    windows, _ = load_windows(config.data)
    model = build_model(config, windows.vocabulary).double().train()
    teacher = load_run(told.path).model.double().eval()
    maps = nn.ModuleList()
    if told.features == "hidden":  # the same first weights
        objective = build(config, ONE).module
        assert isinstance(objective, DistillObjective) and objective.features is not None
        maps.extend(projector.linear for projector in objective.features.projectors.values())  # type: ignore[union-attr]
    trained = [*model.parameters(), *maps.parameters()]
    groups = [
        {"params": [p for p in trained if (p.dim() > 1) == decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    low, high = told.temperature_low, told.temperature_high
    raw = math.log((told.temperature - low) / (high - told.temperature))
    sign = {"fixed": 0.0, "learnable": 1.0, "adversarial": -1.0}[told.temperature_kind]
    rows = []
    for step in range(steps):
        batch = windows.stack(windows_at(step, len(windows), config.data.batch, 0))
        counted = batch["targets"] != -100
        share = 1 / (1 + math.exp(-raw))
        temperature = torch.tensor(low + (high - low) * share, dtype=torch.float32).double().requires_grad_()
        with torch.no_grad():
            teacher_logits, y = streams(teacher, batch["tokens"])
        logits, x = streams(model, batch["tokens"])
        log_p, log_q = ((t[counted] / temperature).log_softmax(-1) for t in (teacher_logits, logits))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        ce = -logits[counted].log_softmax(-1).gather(1, batch["targets"][counted][:, None]).mean()
        distance = torch.zeros((), dtype=torch.float64)
        for (s, t), project in zip(told.feature_pairs, maps, strict=True):
            distance = distance + (project(x[s][counted]) - y[t][counted]).square().mean() / len(maps)
        loss = told.kd_weight * temperature**2 * kl + told.ce_weight * ce + told.feature_weight * distance
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(trained, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = (
                3e-3 * (step + 1) / 5 if step < 5 else 3e-3 * 0.5 * (1 + math.cos(math.pi * (step - 5) / (steps - 6)))
            )
        optimizer.step()
        found = {"kl": kl, "ce": ce, "feature_loss": distance, "temperature": temperature}
        rows.append(
            {name: float(value.detach()) for name, value in found.items()}
            | {"loss": float(ce.detach()), "grad_norm": norm}
        )
        assert temperature.grad is not None
        strength = 0.5 * (1 - math.cos(math.pi * step / (steps - 1))) if sign < 0 else 1.0
        raw -= sign * strength * told.temperature_rate * float(temperature.grad) * (high - low) * share * (1 - share)
    return rows


LOOP = 20


@functools.cache
def expected(**teacher: Any) -> list[dict[str, float]]:
    """By hand, once."""
    return by_hand(student(**hand_sections(teacher)), LOOP)


def hand_sections(teacher: dict[str, Any]) -> dict[str, Any]:
    pairs = {"feature_pairs": [list(pair) for pair in teacher["feature_pairs"]]} if "feature_pairs" in teacher else {}
    return {
        "run": {"steps": LOOP},
        "data": {"pack": False, "micro_batch": 3},
        "precision": {"kind": "fp64"},
        "teacher": {**teacher, **pairs},
        "eval": {"every": 10, "windows": 4},
    }


def check_loop(folder: Path, **teacher: Any) -> None:
    """A run is what the loop by hand is, to 1e-6: its T is rounded to float32."""
    source = {key: value for key, value in teacher.items() if key in ("source", "cache")}
    rest = {key: value for key, value in teacher.items() if key not in source}
    sections = hand_sections(rest)
    sections["teacher"] |= source
    run(student(folder, **sections))
    rows, lines = expected(**rest), metrics(folder)
    assert len(rows) == len(lines) == LOOP
    wrong = [
        f"{name} of step {line['step']}: {line[name]}, not {value}"
        for row, line in zip(rows, lines, strict=True)
        for name, value in row.items()
        if not abs(line[name] - value) <= 1e-6 * max(1.0, abs(value))
    ]
    assert not wrong, wrong[:3]
    assert rows[-1]["loss"] < rows[0]["loss"]


FROZEN_HIDDEN = {**HIDDEN, "feature_pairs": ((0, 0), (2, 1))}
LOOPS: dict[str, dict[str, Any]] = {
    "fixed": {"temperature": 3.0, "kd_weight": 0.7, "ce_weight": 0.2},
    "learnable, projectors": {**LEARNED, **FROZEN_HIDDEN},
    "adversarial": ADVERSARIAL,
}


@pytest.mark.full
@pytest.mark.oracle
@pytest.mark.parametrize("kind", LOOPS)
def test_the_loop_is_what_a_hand_written_one_does(kind: str, tmp_path: Path) -> None:
    check_loop(tmp_path / "run", **LOOPS[kind])
    if kind != "fixed":
        first, *_, last = expected(**LOOPS[kind])
        assert abs(first["temperature"] - last["temperature"]) > 0.01


# ---- the same from every source -------------------------------------------------------------------------------------------


def curve(folder: Path, steps: int, **teacher: Any) -> list[dict[str, Any]]:
    sections: dict[str, Any] = {"run": {"steps": steps}, "eval": {"every": 50, "windows": 4}, "teacher": teacher}
    run(student(folder, **sections))
    lines = metrics(folder)
    assert len(lines) == steps
    return [line | {"objective": line["temperature"] ** 2 * line["kl"] + 0.5 * line["ce"]} for line in lines]


def farthest(one: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> float:
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(one, other, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["learnable", "fixed"])
def test_live_and_cached_teachers_teach_the_same(kind: str, tmp_path: Path) -> None:
    """Top logits are a coarser divergence by what the student does to the ids that are in no list: the loss hardly changes."""
    teacher = LEARNED if kind == "learnable" else {"temperature": 2.0}
    live = curve(tmp_path / "live", 100, **teacher)
    hidden = curve(tmp_path / "hidden", 100, source="hidden", cache=str(cache_of("hidden")), **teacher)
    top = curve(tmp_path / "topk", 100, source="topk", cache=str(cache_of("topk")), **teacher)
    for name in ("loss", "objective", "kl", "temperature"):
        assert farthest(live, hidden, name) < 1e-3, name
    for name in ("loss", "objective", "temperature"):
        assert farthest(live, top, name) < 1e-2, name
    assert live[-1]["kl"] < 0.5 * live[0]["kl"]
    assert farthest(live, [*live[1:], live[-1]], "objective") > 1e-2  # a run that is off by one step would be seen


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("source", ["hidden", pytest.param("topk", marks=pytest.mark.full)])
def test_a_step_reads_the_rows_of_its_own_windows(source: str, pack: bool) -> None:
    """Not the rows of the windows' places in the batch, nor of another micro-batch."""
    gradients = [
        gradients_of(4, {"source": name, **({} if name == "live" else {"cache": str(cache_of(name, pack=pack))})}, pack)
        for name in ("live", source)
    ]
    assert distances(*gradients)["dL/dT"] < 1e-2
    assert max(distances(*gradients).values()) < (2e-2 if source == "hidden" else 0.1)


def test_samples_teach_too(tmp_path: Path) -> None:
    """Unbiased, so the student gets nearer; what samples cannot tell is null, and the file is JSON for everybody."""
    config = student(
        tmp_path / "run", teacher={"source": "sampled", "cache": str(cache_of("sampled")), "ce_weight": 0.0}
    )
    run(config)
    lines = metrics(tmp_path / "run")
    assert lines[0]["agreement"] is lines[0]["correlation"] is lines[0]["teacher_entropy"] is None
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


# ---- micro-batches --------------------------------------------------------------------------------------------------------


def gradients_of(micro_batch: int, teacher: dict[str, Any], pack: bool = False, **sections: Any) -> dict[str, Tensor]:
    """Of the first step's loss: student, projectors, T."""
    data = {"batch": 16, "micro_batch": micro_batch, "pack": pack}
    parts = build(student(teacher={**LEARNED, **teacher}, data=data, **sections), ONE)
    assert isinstance(parts.stepper, PlainStepper) and parts.teaching is not None
    parts.teaching.begin(0)
    parts.stepper.watch(next(iter(parts.batches_from(0, ()))))
    found = {name: p.grad.clone() for name, p in parts.module.named_parameters() if p.grad is not None}
    slope = parts.teaching.temperature.gradient()
    assert slope is not None
    parts.close()
    return {**found, "dL/dT": slope.clone()}


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: float((other[name] - g).norm() / (g.norm() + 1e-12)) for name, g in one.items()}


@pytest.mark.parametrize("micro_batch", [8, 4, 5])
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(micro_batch: int) -> None:
    one, many = (gradients_of(size, HIDDEN) for size in (16, micro_batch))
    assert any("projectors" in name for name in one)
    far = distances(one, many)
    assert {name: value for name, value in far.items() if value > 1e-6} == {}


def test_similarity_is_of_the_tokens_of_a_micro_batch() -> None:
    """CKA is no mean over tokens: its loss is that of each micro-batch, weighted by tokens, so other ones give another."""
    pairs = {"features": "cka", "feature_pairs": [[1, 1]], "feature_weight": 1.0, "kd_weight": 0.0, "ce_weight": 1e-9}
    far = distances(*(gradients_of(size, pairs) for size in (16, 4)))
    del far["dL/dT"]
    assert 1e-3 < far["model.blocks.0.qkv.weight"] < 3


# ---- T is nobody else's -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["learnable", "adversarial"])
def test_the_temperature_is_in_no_group_of_the_optimizer_and_not_in_the_clipped_norm(kind: str) -> None:
    parts = build(student(teacher={**(LEARNED if kind == "learnable" else ADVERSARIAL), **HIDDEN}), ONE)
    assert isinstance(parts.stepper, PlainStepper) and parts.teaching is not None
    parts.teaching.begin(0)
    leaf = parts.teaching._now
    held = [p for group in parts.optimizer.param_groups for p in group["params"]]
    assert leaf.requires_grad and leaf.is_leaf
    assert all(leaf is not p for p in (*held, *parts.module.parameters()))
    assert {id(p) for p in held} == {id(p) for p in parts.module.parameters()}
    assert not any("temperature" in name for name in parts.module.state_dict())
    taken = parts.stepper.take(next(iter(parts.batches_from(0, ()))), 0.0)
    norm = math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in parts.module.parameters() if p.grad is not None)
    )
    assert leaf.grad is not None and leaf.grad.abs() > 1e-3
    assert min(norm, float(taken.values[3])) == pytest.approx(min(1.0, float(taken.values[3])), rel=1e-5)
    assert not any(p.requires_grad for p in parts.teaching.source.model.parameters())  # type: ignore[union-attr]
    parts.close()


# ---- killed, and rolled back ------------------------------------------------------------------------------------------------

ENDED: dict[str, Any] = {**HIDDEN, "feature_from": 12, "feature_weight": 1000.0}
"""So heavy that the student forgets its words."""
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "learnable, features that end": (
        1,
        {"teacher": {**LEARNED, **ENDED}, "model": {"dropout": 0.1}, "optimizer": {"lr": 0.02}, "guard": {"on": False}},
    ),
    "adversarial, similarity, two processes": (
        2,
        {"teacher": {**ADVERSARIAL, "features": "cka", "feature_pairs": [[1, 1]]}, "data": {"micro_batch": 3}},
    ),
    "learnable, sharded both": (
        2,
        {"teacher": {**LEARNED, **HIDDEN, "strategy": "fsdp2"}, "parallel": {"strategy": "fsdp2"}},
    ),
    "top logits": (1, {"teacher": {**LEARNED, "source": "topk"}, "data": {"micro_batch": 2}}),
    "samples, goose": (1, {"teacher": {"source": "sampled"}, "model": {"kind": "goose"}}),
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("kind", RESUMED if FULL else list(RESUMED)[:1])
def test_a_distilled_run_that_was_killed_ends_bitwise_where_the_other_ends(kind: str, tmp_path: Path) -> None:
    processes, sections = RESUMED[kind]
    if (source := sections["teacher"].get("source")) is not None:
        sections = {**sections, "teacher": {**sections["teacher"], "cache": str(cache_of(source))}}
    config = student(**{"eval": {"every": 6}, **sections})
    kills = random_kills(40, 6, seed=2) if FULL else [Kill("step", 33)]
    found = check_resume(config, tmp_path, kills, processes)
    assert {kill: told[:5] for kill, told in found.items() if told} == {}
    lines = metrics(tmp_path / "whole")
    if "features that end" in kind:
        (ended,) = events(tmp_path / "whole", "features_off")
        assert ended["step"] < 33
        features = {line["step"]: line["feature_loss"] for line in lines}
        assert [step for step, value in features.items() if value] == list(range(13, ended["step"] + 1))
        again = [event for i in range(len(kills)) for event in events(tmp_path / f"killed-{i}", "features_off")]
        assert {event["step"] for event in again} == {ended["step"]}
    if "samples" not in kind:
        assert lines[0]["temperature"] != lines[-1]["temperature"]


def spoiled(positions: set[int], seen: list[tuple[int, float, float]]) -> Callable[[Parts], None]:
    """Gradients that are not a number at some positions; tells (step, T, weight of features) of every step taken."""

    def fault(parts: Parts) -> None:
        stepper, teaching = parts.stepper, parts.teaching
        assert isinstance(stepper, PlainStepper) and teaching is not None
        plain = stepper._backward

        def backward(batch: Any, coefficient: float) -> Tensor:
            step = teaching._step
            seen.append((step, float(teaching._now.detach()), teaching.switch.weight(step)))
            total = plain(batch, coefficient)
            if batch.position in positions:
                next(p for p in parts.module.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
            return total

        stepper._backward = backward  # type: ignore[method-assign]

    return fault


@pytest.mark.full
def test_a_rollback_restores_the_temperature_and_keeps_what_evaluations_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validating(monkeypatch, lambda number: [4.0, 3.9, 5.0, 3.0][min(number, 3)])
    seen: list[tuple[int, float, float]] = []
    sections: dict[str, Any] = {
        "run": {"steps": 45},
        "eval": {"every": 11},
        "teacher": {**LEARNED, **HIDDEN, "feature_from": 15},
    }
    _, ended = run(student(tmp_path / "run", **sections), spoiled({36}, seen))
    assert ended.reason == "done"
    (rollback,) = events(tmp_path / "run", "rollback")
    assert (rollback["from"], rollback["to"]) == (37, 30)
    (off,) = events(tmp_path / "run", "features_off")
    assert off["step"] == 33
    first, replayed, again = seen[:37], seen[37:44], seen[44:]  # a replay looks for the module that was not finite
    assert [row[0] for row in again] == list(range(30, 45))
    assert [row[0] for row in replayed] == list(range(30, 37))
    assert again[:6] == first[30:36]  # bit for bit, with the features that there were
    assert [weight for _, _, weight in first] == [0.0] * 15 + [0.3] * 18 + [0.0] * 4
    assert {weight for step, _, weight in again if step >= 33} == {0.0}
    assert [line["temperature"] for line in metrics(tmp_path / "run")][35] == pytest.approx(again[5][1])


def check_switch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that harm are switched off, told once."""
    validating(monkeypatch, lambda number: [4.0, 4.0, 4.05, 4.3][min(number, 3)])
    seen: list[tuple[int, float, float]] = []
    run(student(folder, eval={"every": 7}, teacher={**HIDDEN, "feature_from": 10}), spoiled(set(), seen))
    assert [event["step"] for event in events(folder, "features_off")] == [28]
    assert [weight for _, _, weight in seen] == [0.0] * 10 + [0.3] * 18 + [0.0] * 12
    values = [line["feature_loss"] for line in metrics(folder)]
    assert [value > 0 for value in values] == [10 <= step < 28 for step in range(40)]


def test_features_that_harm_are_switched_off_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_switch(tmp_path / "run", monkeypatch)


# ---- events -----------------------------------------------------------------------------------------------------------------


class Crash(Exception):
    """The process ends, as far as a run can tell."""


def crashing(step: int) -> Callable[[Parts], None]:
    def fault(parts: Parts) -> None:
        teaching = parts.teaching
        assert teaching is not None
        plain = teaching.begin

        def begin(number: int) -> None:
            if number == step:
                raise Crash
            plain(number)

        teaching.begin = begin  # type: ignore[method-assign]

    return fault


@pytest.mark.full
def test_what_goes_wrong_is_told_once_and_not_again_by_a_resumed_run(tmp_path: Path) -> None:
    steps = STUCK_STEPS + 40
    sections: dict[str, Any] = {
        "run": {"steps": steps},
        "model": {"kind": "goose", "layers": 1},
        "teacher": {"temperature_kind": "learnable", "temperature_rate": 50.0, "correlation": 0.9999},
        "eval": {"every": 20, "windows": 4, "dead": 0.0, "saturated": 0.0},
        "guard": {"on": False},
    }
    config = student(tmp_path / "run", **sections)
    with pytest.raises(Crash):
        run(config, crashing(steps - 5))
    before = {kind: events(tmp_path / "run", kind) for kind in ("temperature_stuck", "teacher_far", "unhealthy")}
    assert [len(before[kind]) for kind in ("temperature_stuck", "teacher_far")] == [1, 1]
    assert before["teacher_far"][0]["step"] == 20 and before["teacher_far"][0]["correlation"] < 0.9999
    assert min(abs(before["temperature_stuck"][0]["temperature"] - bound) for bound in (1, 5)) < 0.04
    assert before["temperature_stuck"][0]["step"] < steps - 15
    assert before["unhealthy"] and all("channels" in text for text in before["unhealthy"][0]["problems"])
    _, ended = run(config)
    assert ended.reason == "done"
    assert len(events(tmp_path / "run", "resumed")) == 1
    for kind in ("temperature_stuck", "teacher_far"):
        assert events(tmp_path / "run", kind) == before[kind]
    assert evaluations(tmp_path / "run")[-1]["spikes"]


def test_a_run_is_not_resumed_with_another_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The teacher's run may have gone on since: its best checkpoint is another model."""
    config = student(tmp_path / "run", teacher={"path": str(tmp_path / "teacher")})
    copytree(teacher_run(), tmp_path / "teacher")
    with pytest.raises(Crash):
        run(config, crashing(25))
    rmtree(tmp_path / "teacher")
    there = dataclasses.replace(config.run, folder=str(tmp_path / "teacher"), seed=1)
    run(dataclasses.replace(load_run(teacher_run()).config, run=there))
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "gramian: teacher: is not the one of" in capsys.readouterr().err


# ---- bugs that must be seen ------------------------------------------------------------------------------------------


def _adam(self: Any, step: int, gradient: Tensor | None) -> None:
    """T as one more parameter of AdamW: divided by its own size, and decayed."""
    self._leaf = None
    if gradient is None or not self.options.learns:
        return
    raw = self._state[0] - self.options.rate * (gradient.sign() + 0.1 * self._state[0])
    self._state = torch.stack([raw, gradient, *self._state[2:]])


def _decayed(self: Any, step: int, gradient: Tensor | None) -> None:
    _plain_finish(self, step, gradient)
    self._state = self._state * torch.tensor([1 - 1e-3 * 0.1, 1, 1, 1, 1, 1], dtype=torch.float64)


_plain_finish = Temperature.finish

_LOOP = {
    "T stepped by AdamW": (Swap("Temperature.finish", _adam), "learnable, projectors"),
    "T decayed": (Swap("Temperature.finish", _decayed), "learnable, projectors"),
    "T in the clipped norm": (
        Edit(
            "PlainStepper._clip",
            "norm = get_total_norm(gradients)",
            "norm = get_total_norm([*gradients, self.teaching.temperature._state[1].reshape(1)])",
        ),
        "learnable, projectors",
    ),
    "an adversary that helps": (
        Edit("Temperature._direction", "-1.0 if", "1.0 if"),
        "adversarial",
    ),
    "features detached": (
        Edit("FeatureLoss.forward", "student[s].flatten", "student[s].detach().flatten"),
        "learnable, projectors",
    ),
    "a teacher that drops out": (
        (
            Edit("live_teacher:_frozen", "model.eval()", "model.train()"),
            Edit("LiveTeacher._forward", "if self.model.training:", "if False:"),
        ),
        "fixed",
    ),
    "no T²": (
        Edit(
            "DistillObjective.forward",
            "**asdict(self._objective)",
            "**asdict(self._objective) | {'kd_weight': self._objective.kd_weight / float(temperature) ** 2}",
        ),
        "fixed",
    ),
    "the mean of each micro-batch": (
        Edit("DistillObjective.forward", "terms = 1.0 / coefficient", "terms = None"),
        "fixed",
    ),
    "layers one off": (
        Edit("FeatureLoss.forward", "teacher[t].flatten", "teacher[1 - t].flatten"),
        "learnable, projectors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", sample(list(_LOOP), 2, case=lambda bug: None))
def test_a_bug_in_the_loop_is_seen(bug: str, tmp_path: Path) -> None:
    changes, kind = _LOOP[bug]
    expected(**LOOPS[kind])  # by hand, without the bug
    with ExitStack() as stack:
        for change in changes if isinstance(changes, tuple) else (changes,):
            stack.enter_context(change.applied())
        with pytest.raises(RED):
            check_loop(tmp_path / "run", **LOOPS[kind])


@pytest.mark.full
def test_a_dead_switch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference took its measure at step 500, inside of "every 300 steps"."""
    bug = Edit(
        "FeatureSwitch.validated",
        "if done <= self.begin or not self._measures:",
        "if not self._measures and not (done % 300 == 0 and done == 500):\n        return None\n    if not self._measures:",
    )
    with bug.applied(), pytest.raises(RED):
        check_switch(tmp_path / "run", monkeypatch)


def test_rows_of_other_windows_are_seen() -> None:
    bug = Edit("Cache._gathered", "[int(window) for window in windows_B.tolist()]", "[*range(len(windows_B))]")
    cache_of("hidden", pack=True)
    with bug.applied(), pytest.raises(RED):
        test_a_step_reads_the_rows_of_its_own_windows("hidden", True)
