"""The model of a run that was saved: its best weights, whoever wrote them; as a teacher it must read the student's data."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.saved_run import load_run
from gramian.verify.resume import train as train_apart
from tests.data.test_tokenizer import saved as tokenizer_folder
from tests.train.distilled import cache_of, data, metrics, student, teacher_run, validating
from tests.train.runs import run, small

pytestmark = pytest.mark.xdist_group("distill")


@pytest.mark.parametrize(("kind", "tied"), [("gpt", True), pytest.param("goose", False, marks=pytest.mark.full)])
def test_it_has_the_weights_of_the_best_checkpoint_not_the_newest(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validating(monkeypatch, lambda number: abs(number - 3.0))
    config = small(
        tmp_path / "run", model={"kind": kind, "tied": tied, "width": 16}, data=data(), eval={"every": 5, "windows": 8}
    )
    trainer, _ = run(config)
    assert trainer.best is not None and trainer.best["step"] == 20
    found = load_run(tmp_path / "run")
    assert (found.best, found.step, found.config) == (True, trainer.best["step"], config)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    best, newest = store.best(config.hash), store.newest(config.hash)
    assert best is not None and newest is not None and newest.step == 40
    state = found.model.state_dict()
    for name, tensor in state.items():
        if f"model.model.{name}" in best.tensors():
            assert torch.equal(tensor, best.tensors()[f"model.model.{name}"]), name
    assert not all(
        torch.equal(state[name.removeprefix("model.model.")], tensor)
        for name, tensor in newest.tensors().items()
        if name.startswith("model.model.")
    )


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_run_without_an_evaluation_has_its_newest(precision: str, tmp_path: Path) -> None:
    trainer, _ = run(small(tmp_path / "run", data=data(), run={"steps": 10}, precision={"kind": precision}))
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    for path in (tmp_path / "run" / "checkpoints").rglob("best*"):
        path.unlink() if path.is_file() or path.is_symlink() else rmtree(path)
    store.close()
    found = load_run(tmp_path / "run")
    assert found.step == 10
    for name, p in trainer.parts.model.named_parameters():
        assert torch.equal(p, found.model.get_parameter(name))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_of_two_processes_teaches_on_one(strategy: str, tmp_path: Path) -> None:
    told: dict[str, Any] = {"data": data(), "run": {"steps": 10}, "precision": {"kind": "fp64"}}
    train_apart(small(**told), tmp_path / "one")
    train_apart(small(**told, parallel={"strategy": strategy}), tmp_path / "two", 2)
    one, two = (load_run(tmp_path / name).model for name in ("one", "two"))
    for name, p in one.named_parameters():
        assert torch.allclose(p, two.get_parameter(name), atol=1e-9), name
    run(student(tmp_path / "student", teacher={"path": str(tmp_path / "two")}, run={"steps": 10}))
    assert len(metrics(tmp_path / "student")) == 10


def test_projectors_of_a_student_are_left_behind(tmp_path: Path) -> None:
    """A student with features is a model like others, and may teach in its turn."""
    told = {"features": "hidden", "feature_pairs": [[1, 1]]}
    run(student(tmp_path / "run", teacher=told, run={"steps": 10}))
    assert not [name for name, _ in load_run(tmp_path / "run").model.named_parameters() if "projector" in name]
    run(student(tmp_path / "next", teacher={"path": str(tmp_path / "run")}, run={"steps": 10}))


# ---- teachers that cannot be ----------------------------------------------------------------------------------------------


def broken(name: str) -> Callable[[Path], Path]:
    """A copy of the teacher without one of its parts."""

    def make(folder: Path) -> Path:
        copytree(teacher_run(), folder / "teacher")
        path = folder / "teacher" / name
        rmtree(path) if path.is_dir() else path.unlink()
        return folder / "teacher"

    return make


def empty(folder: Path) -> Path:
    (folder / "teacher").mkdir()
    return folder / "teacher"


def damaged(folder: Path) -> Path:
    copytree(teacher_run(), folder / "teacher")
    for path in (folder / "teacher" / "checkpoints").rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    return folder / "teacher"


TEACHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no folder": (
        lambda folder: folder / "nowhere",
        "teacher.path: {} holds no model; expected the folder of a run, or of a",
    ),
    "an empty folder": (empty, "teacher.path: {} holds no model; expected"),
    "a file": (lambda folder: teacher_run() / "config.toml", "teacher.path: {} holds no model; expected"),
    "no checkpoint": (broken("checkpoints"), "teacher.path: {} has no checkpoint that can be read; expected a run"),
    "damaged checkpoints": (damaged, "teacher.path: {} has no checkpoint that can be read (state.safetensors"),
    "no record": (broken("record.json"), "teacher.path: {}/record.json cannot be read; expected that of a run"),
}


def refused(capsys: pytest.CaptureFixture[str], folder: Path, command: str, *overrides: str, **sections: Any) -> str:
    """The line of a command that refuses its input; nothing that looks like a run is left behind."""
    (folder / "student.toml").write_text(student(folder / "run", **sections).toml())
    capsys.readouterr()
    assert main([command, str(folder / "student.toml"), *overrides]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gramian: ") and told.count("\n") == 1
    assert not (folder / "run" / "metrics.jsonl").exists() or not metrics(folder / "run")
    return told.removeprefix("gramian: ").strip()


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("command", ["train", "cache"])
def test_a_teacher_that_is_none_is_one_line(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, says = TEACHERS[kind]
    path = make(tmp_path)
    source = ["teacher.source=hidden"] if command == "cache" else []
    assert refused(capsys, tmp_path, command, f"teacher.path={path}", *source).startswith(says.format(path))


def huggingface(folder: Path, vocabulary: int = 300) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def test_a_teacher_that_cannot_read_the_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*overrides: str) -> str:
        return refused(capsys, tmp_path, "train", *overrides)

    words = f"data.tokenizer={tokenizer_folder(tmp_path / 'words')}"
    assert says(words) == f"data.tokenizer: is not that of {teacher_run()}; expected the teacher's"
    assert says("data.length=25") == "data.length: expected at most the teacher's context of 24, got 25"
    small_one = f"teacher.path={huggingface(tmp_path / 'small', 200)}"
    assert "its vocabulary of 200 is smaller than the tokenizer's 257; expected" in says(small_one)
    other = f"teacher.path={huggingface(tmp_path / 'other')}"
    assert says(other, "data.length=33") == "data.length: expected at most the model's context of 32, got 33"
    tokenizer_folder(tmp_path / "other")
    assert says(other) == f"data.tokenizer: is not that of {tmp_path / 'other'}; expected the teacher's"


# ---- configs that cannot be -------------------------------------------------------------------------------------------------

CKA = "teacher.features=cka"
CONFIGS: dict[tuple[str, ...], str] = {
    (CKA,): "teacher.feature_pairs: expected pairs of layers with teacher.features",
    ("teacher.feature_pairs=[[1,1]]",): "teacher.feature_pairs: expected pairs of layers with teacher.features",
    (CKA, "teacher.feature_pairs=[[9,1]]"): "teacher.feature_pairs: layers: GPT has no layer 9; expected 0 to 2",
    (CKA, "teacher.feature_pairs=[[1,9]]"): "teacher.feature_pairs: layers: GPT has no layer 9; expected 0 to 2",
    (CKA, "teacher.feature_pairs=[[1,1],[1,2]]"): "teacher.feature_pairs: layers: [1, 1] names one twice",
    (CKA, "teacher.feature_pairs=[[1,1],[2,1]]"): "teacher.feature_pairs: layers: [1, 1] names one twice",
    (CKA, "teacher.feature_pairs=[[1]]"): "teacher.feature_pairs[0]: expected array of length 2",
    (
        "teacher.features=increments",
        "teacher.feature_pairs=[[1,1]]",
    ): 'teacher.feature_pairs: expected 2 or more for "incr',
    ("kfac.update_freq=3",): "teacher: its loss bypasses the layers that [kfac] observes",
    ("privacy.noise_multiplier=1.0",): "teacher: its loss bypasses the layers that [privacy] observes",
    (
        "teacher.source=sampled",
        "teacher.temperature_kind=learnable",
    ): "teacher.source: samples are valid for one temperature",
    ("teacher.source=sampled", "teacher.direction=reverse"): "teacher.source: samples are valid for one temperature",
    ("teacher.path=",): "teacher.path: expected the folder of a model",
    ("teacher.kd_weight=0", "teacher.ce_weight=0"): "teacher.kd_weight: is 0, and teacher.ce_weight too",
    ("teacher.temperature=0",): "teacher.temperature: expected float > 0.0",
    (
        "teacher.temperature_kind=learnable",
        "teacher.temperature=6",
    ): "teacher.temperature: expected more than temperature_low",
    ("teacher.temperature_low=4", "teacher.temperature_high=2"): "teacher.temperature_low: expected 0 < low < high",
}


@pytest.mark.parametrize("overrides", CONFIGS, ids=" ".join)
def test_a_config_that_cannot_be_is_one_line(
    overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, tmp_path, "train", *overrides).startswith(CONFIGS[overrides])


# ---- caches that do not fit -------------------------------------------------------------------------------------------------

CACHES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "other windows": ("hidden", ("data.length=12",), "teacher.cache: windows: the cache {} was made with"),
    "another cut": ("hidden", ("data.pack=false",), "teacher.cache: windows: the cache {} was made with"),
    "another kind": ("hidden", ("teacher.source=topk",), "teacher.cache: kind: the cache {} was made with hidden"),
    "no layers": ("hidden", (CKA, "teacher.feature_pairs=[[1,1]]"), "teacher.cache: layers: the cache {} holds [], not 1"),
    "a higher temperature": ("topk", ("teacher.temperature=6.0",), "teacher.temperature: 6 to 6 is wanted, the cache"),
    "a wider range": (
        "topk", ("teacher.temperature_kind=learnable", "teacher.temperature_high=7.0"), "teacher.temperature: 1 to 7 is wanted",
    ),
    "other samples": ("sampled", ("teacher.temperature=3.0",), "teacher.temperature: 3 to 3 is wanted, the cache"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_does_not_fit_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, overrides, says = CACHES[kind]
    told = {"source": source, "cache": str(cache_of(source))}
    assert refused(capsys, tmp_path, "train", *overrides, teacher=told).startswith(says.format(cache_of(source)))


def test_a_cache_that_is_none_or_not_whole_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(folder: Path, *overrides: str) -> str:
        return refused(capsys, tmp_path, "train", *overrides, teacher={"source": "hidden", "cache": str(folder)})

    assert says(tmp_path / "none").startswith(f"teacher.cache: {tmp_path / 'none'} has no manifest.json; expected")
    words = f"data.tokenizer={tokenizer_folder(tmp_path / 'words')}"
    assert says(cache_of("hidden"), words).startswith(
        f"teacher.cache: tokenizer: the cache {cache_of('hidden')} was made with"
    )
    copytree(cache_of("hidden"), tmp_path / "short")
    shard = next(path for path in (tmp_path / "short" / "shards").iterdir() if path.suffix != ".json")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in says(tmp_path / "short")
    manifest = tmp_path / "short" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "sha256": "0"}))
    assert "manifest.json" in says(tmp_path / "short")


def test_what_is_no_run_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="^run folder: .* holds no run; expected a folder with config.toml and"):
        load_run(tmp_path)
