"""The files of gramian/examples/: every one of them trains, and gpt_small.toml names every key there is."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from gramian.cli import main
from gramian.train.config.config import RUN_ONLY, SECTIONS, Config, load_config
from gramian.train.loop.schedule import learning_rate
from gramian.train.state.run_folder import read_lines
from tests.data.test_tokenizer import saved
from tests.kit.matrix import FULL

EXAMPLES = Path(__file__).parents[2] / "gramian" / "examples"
FILES = sorted(EXAMPLES.glob("*.toml"))
SLOW = ("distill_topk", "goose", "goose_seed", "schedule_5000", "schedule_warmup_50", "jsonl")
"""Trained in the full mode alone."""
STEPS = 6
SHRUNK = [
    f"run.steps={STEPS}", "run.log_every=1", "run.device=cpu", "model.layers=2", "model.width=16", "model.heads=2",
    "data.limit_bytes=300_000", "data.length=16", "data.batch=4", "data.micro_batch=2", "data.workers=0",
    "schedule.warmup=2", "schedule.decay=2", "compile.mode=off", "checkpoint.snapshot_every=2", "eval.windows=4",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds whatever the examples name."""
    texts = [f"Document {number} says that {number} times {number} is {number**2}.\n" * 3 for number in range(80)]
    (tmp_path / "data" / "text").mkdir(parents=True)
    for number, text in enumerate(texts):
        (tmp_path / "data" / "text" / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines[:70]))
    (tmp_path / "data" / "validation.jsonl").write_text("".join(lines[70:]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


LONGER = ["data.length=64", "data.batch=32", "data.micro_batch=16"]  # few forwards of a teacher that reads everything
OVERRIDES = {  # where the common ones do not fit
    "distill": LONGER,
    "distill_topk": [*LONGER, "teacher.knots=2"],
    "goose": LONGER,
    "private": [] if FULL else ["privacy.accountant=rdp"],  # whose search for the noise is three times as fast
    "goose_seed": ["model.layers=5", "data.stride=8", "teacher.feature_from=2", "eval.every=2"],
}


def save_model(path: Path, layers: int = 2) -> None:
    """A Hugging Face folder: config, weights and tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    told = GPT2Config(
        vocab_size=300, n_positions=32, n_embd=16, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(told).save_pretrained(path)
    saved(path)


def prepare(file: Path, folder: Path, overrides: list[str]) -> None:
    """What an example says that comes before it: a model, a teacher, the teacher's cache."""
    if file.stem == "huggingface":
        save_model(folder / "models" / "my-model")
    if file.stem == "chat":
        save_model(folder / "models" / "my-model")
        (folder / "models" / "my-model" / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
        )
        for name, count in (("chats", 60), ("chats_validation", 9)):
            chats = [
                [{"role": "user", "content": f"{n} times {n}?"}, {"role": "assistant", "content": f"{n**2}, {name}"}]
                for n in range(count)
            ]
            lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
            (folder / "data" / f"{name}.jsonl").write_text(lines)
    if file.stem == "goose_seed":
        save_model(folder / "models" / "gpt2", layers=12)
        for split in ("train", "validation"):
            texts = sorted((folder / "data" / "text").glob(f"*{'' if split == 'train' else '9'}.txt"))
            (folder / "data" / f"wikitext2.{split}.txt").write_text(split.join(text.read_text() for text in texts))
    config = load_config(file, overrides)
    if config.teacher is not None and config.teacher.source != "live":
        own = [override for override in overrides if not override.startswith("teacher.")]
        teacher = [*own, f"run.folder={config.teacher.path}", "run.steps=3", "model.width=32"]
        assert main(["train", str(EXAMPLES / "gpt_small.toml"), *teacher]) == 0
        assert main(["cache", str(file), *overrides]) == 0


def metrics(run: Path, key: str) -> list[Any]:
    return [line[key] for line in read_lines(run / "metrics.jsonl") if key in line]


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.full) if file.stem in SLOW else file for file in FILES],
    ids=lambda file: file.stem,
)
def test_an_example_trains(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*SHRUNK, *OVERRIDES.get(file.stem, [])]
    prepare(file, folder, overrides)
    assert main(["train", str(file), *overrides]) == 0, capsys.readouterr().err
    config = load_config(file, overrides)
    run = folder / config.run.folder
    assert run.parent == folder / "runs" and run.name == file.stem
    assert load_config(run / "config.toml") == config
    assert len(metrics(run, "loss")) == STEPS and metrics(run, "validation_loss")
    assert metrics(run, "lr")[-1] == config.schedule.floor
    (newest,) = sorted((run / "checkpoints").glob(f"step-*{STEPS}"))
    names = tensors(newest)
    assert any(name.startswith("optimizer.") for name in names)
    assert any(name.startswith("kfac.") for name in names) == config.has_curvature
    facts = json.loads((newest / "facts.json").read_text())
    assert ("kfac" in facts, "privacy" in facts) == (config.has_curvature, file.stem == "private")
    assert ("teaching" in facts) == bool(metrics(run, "kl")) == (config.teacher is not None)
    if config.teacher is not None and config.teacher.features != "none":
        assert [value > 0 for value in metrics(run, "feature_loss")] == [False] * 2 + [True] * (STEPS - 2)
    assert bool(metrics(run, "spikes")) == (config.model.kind == "goose")
    record = json.loads((run / "record.json").read_text())
    assert record["strategy"] == ("fsdp2" if file.stem == "fsdp2" else "one")
    epsilons = metrics(run, "epsilon")
    assert bool(epsilons) == (file.stem == "private")
    if config.privacy is not None:
        assert 0 < epsilons[-1] <= config.privacy.target_epsilon
        assert "validation_loss" in metrics(run, "not_covered_by_epsilon")[-1]


def tensors(checkpoint: Path) -> list[str]:
    found = []
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found += list(opened.keys())
    return found


def test_a_second_start_goes_on_where_the_first_was_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / "gpt_small.toml"
    assert main(["train", str(file), *SHRUNK]) == 0
    assert main(["train", str(file), *SHRUNK, "run.log_every=2", "data.prefetch=3"]) == 0
    told = [event["event"] for event in read_lines(folder / "runs" / "gpt_small" / "events.jsonl")]
    assert told.count("resumed") == 1
    assert main(["train", str(file), *SHRUNK, "optimizer.lr=1e-4"]) == 2
    assert "optimizer.lr is 0.001 there, 0.0001 here" in capsys.readouterr().err


# ---- what they say ---------------------------------------------------------------------------------------------------


def uncommented(text: str) -> dict[str, dict[str, Any]]:
    """The TOML with its commented-out sections and keys."""
    return tomllib.loads(re.sub(r"^# (?=\[\w+\]|\w+ = )", "", text, flags=re.MULTILINE))


def test_gpt_small_names_every_key_with_its_default() -> None:
    text = (EXAMPLES / "gpt_small.toml").read_text(encoding="utf-8")
    told = uncommented(text)
    assert {name: set(section) for name, section in told.items()} == {
        name: {field.name for field in dataclasses.fields(section)} for name, section in SECTIONS.items()
    }
    for name, section in SECTIONS.items():
        for key, value in told[name].items():
            read = getattr(msgspec.convert({key: value}, section), key)
            default = getattr(section(), key)
            if default is not None and (name, key) != ("run", "folder"):
                assert read == default, f"{name}.{key}"


def test_gpt_small_is_the_default_config() -> None:
    config = load_config(EXAMPLES / "gpt_small.toml", [f"run.folder={Config().run.folder}"])
    assert config == Config()


def test_gpt_small_marks_the_keys_that_may_change_between_two_starts() -> None:
    found, section = set(), ""
    for line in (EXAMPLES / "gpt_small.toml").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"(?:# )?\[(\w+)\]", line):
            section = heading[1]
        elif marked := re.match(r"(?:# )?(\w+) = .*# \* ", line):
            found.add((section, marked[1]))
    assert found == set(RUN_ONLY)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_section_and_key_of_an_example_is_explained(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# ") and f"gramian/examples/{file.name}" in text
    lines = [line for line in text.splitlines() if re.match(r"(# )?(\[\w+\]|\w+ = )", line)]
    assert lines
    for line in lines:
        assert re.search(r" # \S", line), line


def test_the_warm_up_of_50_ends_at_the_floor_and_not_at_half_of_the_peak() -> None:
    rates = rates_of("schedule_warmup_50")
    assert rates[0] == pytest.approx(3e-4 / 50)
    assert rates[49] == rates[50] == 3e-4
    assert rates[(50 + 2999) // 2] == pytest.approx(1.5e-4, rel=1e-2)
    assert rates[-1] == 0.0


def test_the_schedule_of_5000_steps_ends_at_1e_6() -> None:
    rates = rates_of("schedule_5000")
    assert len(rates) == 5000
    assert rates[99] == rates[100] == max(rates)
    assert rates[-1] == 1e-6 < rates[-2]


def rates_of(stem: str) -> list[float]:
    config = load_config(EXAMPLES / f"{stem}.toml")
    steps = config.run.steps
    return [learning_rate(step, steps, config.schedule, config.optimizer) for step in range(steps)]


# ---- Slurm -----------------------------------------------------------------------------------------------------------

STUBS = {
    "scontrol": '[ "$1" = show ] && echo node7 || echo "scontrol $*" >> calls',
    "srun": '"$@"',
    "torchrun": 'echo "torchrun $*" >> calls; exit $STATUS',
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("event", "status", "again"), [("interrupted", 1, True), pytest.param("stopped", 1, False, marks=pytest.mark.full)]
)
def test_the_slurm_script_requeues_a_run_that_was_asked_to_leave(
    event: str, status: int, again: bool, tmp_path: Path
) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run").mkdir()
    told = [{"event": "resumed"}, {"event": event}, {"event": "checkpoint_written"}]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "train.slurm"), str(EXAMPLES / "gpt_small.toml"), "run.folder=run"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": path, "STATUS": str(status)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--nnodes=2 --nproc-per-node=8" in calls[0] and "--rdzv-endpoint=node7:29500" in calls[0]
    assert calls[0].endswith(f"-m gramian train {EXAMPLES / 'gpt_small.toml'} run.folder=run")
    assert calls[1:] == ["scontrol requeue 42"] * again
