"""The doctor of a student: a healthy one is green, and every bug that is put into it turns its own check red."""

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.data import load_windows
from gramian.distill.teacher.teacher_origin import ORIGIN
from gramian.train.build.build_model import build_model
from gramian.train.doctor import examine
from gramian.train.doctor.check import Check
from gramian.train.doctor.checks.causality import causality
from gramian.train.doctor.checks.goose_scan import goose_scan
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.doctor.teacher import teacher_checks
from gramian.train.loop.precision import resolve_precision
from tests.kit.mutations import Edit, Swap
from tests.train.distilled import LEARNED, cache_of, student
from tests.train.runs import ONE, run, small

pytestmark = pytest.mark.xdist_group("distill")

HIDDEN: dict[str, Any] = {"features": "hidden", "feature_pairs": [[0, 0], [2, 1]]}


def subject_of(**sections: Any) -> ExaminedRun:
    config = student(**sections)
    windows, _ = load_windows(config.data)
    return ExaminedRun(
        config,
        resolve_precision(config.precision, ONE.device),
        ONE,
        windows,
        partial(build_model, config, windows.vocabulary),
    )


def taught(**sections: Any) -> dict[str, Check]:
    return {check.name: check for check in teacher_checks.teacher(subject_of(**sections))}


# ---- a healthy student ---------------------------------------------------------------------------------------------------


def test_a_healthy_student_is_green() -> None:
    config = student(teacher={**LEARNED, **HIDDEN}, model={"kind": "goose"}, doctor={"overfit_steps": 1})
    checks = examine.examine(config)
    names = [check.name for check in checks]
    assert [check.name for check in checks if not check.ok] == ["overfit"]
    assert {"teacher frozen", "first distance", "feature gradient", "scan = sequential", "causality"} <= set(names)
    assert all("\n" not in text for check in checks for text in (check.measured, check.threshold, check.hint))


@pytest.mark.parametrize("source", ["hidden", *(pytest.param(s, marks=pytest.mark.full) for s in ("topk", "sampled"))])
def test_a_cache_is_compared_with_its_teacher(source: str) -> None:
    checks = taught(teacher={"source": source, "cache": str(cache_of(source))})
    assert all(check.ok for check in checks.values())
    assert "cache = teacher" in checks and "teacher frozen" not in checks
    without = taught(teacher={"source": source, "cache": str(cache_of(source)), "path": ""})
    assert without["cache = teacher"].ok and without["cache = teacher"].measured == "not compared"


@pytest.mark.parametrize("temperature", [1.0, 5.0])
@pytest.mark.parametrize("kind", ["gpt", "goose"])
@pytest.mark.parametrize("seed", range(2))
def test_fresh_students_start_where_they_must(kind: str, temperature: float, seed: int) -> None:
    """V = 257 ids; the seeds' ln V, times T², is not it: the teacher's entropy is missing."""
    sections: dict[str, Any] = {
        "model": {"kind": kind, "width": 32},
        "run": {"seed": seed},
        "teacher": {"temperature": temperature},
    }
    check = taught(**sections)["first distance"]
    assert check.ok, check
    assert check.value < 0.95 * temperature**2 * math.log(257)


def padded(folder: Path, vocabulary: int) -> Path:
    """A Hugging Face model whose head has rows that no token belongs to."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(shape)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
            model.lm_head.weight[257:] *= 3  # nobody taught it to leave them alone
        model.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_ids_that_no_token_has_count_where_both_sides_have_them(tmp_path: Path) -> None:
    """The loss is over the ids that both heads know, 320 of them, not over the tokenizer's 257."""
    told = {"kind": "huggingface", "path": str(padded(tmp_path / "student", 320)), "fresh": True, "width": 128}
    check = taught(model=told, teacher={"path": str(padded(tmp_path / "teacher", 384))})["first distance"]
    assert check.ok, check
    assert taught(teacher={"path": str(tmp_path / "teacher")})["first distance"].ok


def test_a_loaded_student_must_be_nearer_than_one_that_knows_nothing(tmp_path: Path) -> None:
    path = str(padded(tmp_path / "model", 257))
    model = {"kind": "huggingface", "path": path}
    assert taught(model=model, teacher={"path": path})["first distance"].value == pytest.approx(0, abs=1e-5)
    assert not taught(model=model)["first distance"].ok


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = student(tmp_path / "run", doctor={"overfit_steps": 1})
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["doctor", str(tmp_path / "run.toml")]) == 1  # nothing is learnt by heart in a step
    told = capsys.readouterr()
    assert "teacher frozen" in told.out and "first distance" in told.out


# ---- bugs ------------------------------------------------------------------------------------------------------------------


def eps_scan(
    u_BTD: Tensor, decay_D: Tensor, keep_BT: Tensor | None = None, initial_BD: Tensor | None = None, chunk: int = 16
) -> Tensor:
    """The seed's: a cumulative sum, divided by powers that have underflowed."""
    powers_TD = decay_D ** torch.arange(u_BTD.shape[1])[:, None]
    return powers_TD * (u_BTD / (powers_TD + 1e-8)).cumsum(1)


def over_time(x_BTC: Tensor) -> Tensor:
    """A threshold that knows the future."""
    return x_BTC.abs().mean(dim=(-2, -1), keepdim=True).expand(*x_BTC.shape[:-1], 1)


def scanned() -> Check:
    return goose_scan(subject_of(model={"kind": "goose", "width": 16}, data={"length": 64}))[0]


def leaking() -> Check:
    checks = causality(subject_of(model={"kind": "goose"}))
    return next(check for check in checks if check.name == "causality")


def frozen() -> Check:
    return taught()["teacher frozen"]


def distance(**sections: Any) -> Check:
    return taught(**sections)["first distance"]


def cached() -> Check:
    return taught(teacher={"source": "hidden", "cache": str(cache_of("hidden"))})["cache = teacher"]


def with_features() -> Check:
    return taught(teacher=HIDDEN)["feature gradient"]


KD = "**asdict(self._objective)"
KD_BUG = KD + " | {'kd_weight': self._objective.kd_weight / float(temperature) ** 2}"
CHUNK = "torch.addcmul(u_BD, a_BD, state_BD)"
WINDOWS = "[int(window) for window in windows_B.tolist()]"
OBJECTIVE = "gramian.distill.distill_objective:DistillObjective.forward"
BUGS: dict[str, tuple[Callable[[], Check], tuple[Edit | Swap, ...]]] = {
    "a scan that divides by what has underflowed": (scanned, (Swap("scan:scan", eps_scan),)),
    "a scan that forgets between chunks": (
        scanned,
        (Edit("scan:_states", CHUNK, "u_BD + a_BD * state_BD * (u_BTD.shape[1] > 4)"),),
    ),
    "a threshold over time": (leaking, (Swap("spike:size_of", over_time),)),
    "a teacher that may learn": (frozen, (Edit("live_teacher:_frozen", ".requires_grad_(False)", ""),)),
    "a teacher that drops out": (frozen, (Edit("live_teacher:_frozen", "model.eval()", "model.train()"),)),
    "no T²": (distance, (Edit("DistillObjective.forward", KD, KD_BUG),)),
    "a teacher at another temperature": (
        distance,
        (Edit("LiveTeacher._forward", "hidden_BTD.to(", "(2 * hidden_BTD).to("),),
    ),
    "a loss of the mean of each micro-batch": (
        partial(distance, data={"micro_batch": 3, "pack": False}),
        (Edit("DistillObjective.forward", "terms = 1.0 / coefficient", "terms = None"),),
    ),
    "rows of other windows": (cached, (Edit("Cache._gathered", WINDOWS, "[0] * len(windows_B)"),)),
    "detached features": (with_features, (Edit("FeatureLoss.forward", "student[s]", "student[s].detach()"),)),
    "features without a weight": (
        with_features,
        (Edit("DistillObjective.forward", "(feature_weight * coefficient) * distance", "0.0 * distance"),),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_turns_its_check_red(bug: str) -> None:
    look, changes = BUGS[bug]
    assert look().ok
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change.applied())
        assert not look().ok
    assert look().ok


def test_a_cache_of_a_teacher_that_went_on_is_seen(tmp_path: Path) -> None:
    config = small(
        tmp_path / "other", model={"width": 24, "layers": 2}, data=student().data.__dict__, run={"steps": 20}
    )
    run(config)
    told = {"path": str(tmp_path / "other"), "source": "hidden", "cache": str(cache_of("hidden"))}
    with pytest.raises(GramianError, match="teacher.path: .* is not, or no longer, what the cache"):
        taught(teacher=told)
    shutil.copytree(cache_of("hidden"), tmp_path / "cache", ignore=shutil.ignore_patterns(ORIGIN))
    check = taught(teacher={**told, "cache": str(tmp_path / "cache")})
    assert not check["cache = teacher"].ok
