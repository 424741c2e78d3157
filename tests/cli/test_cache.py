"""`gramian cache`: what it writes is what `gramian train` reads, once, whatever the teacher is."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.distill.cache.reader import open_cache
from gramian.distill.teacher.teacher_origin import fingerprint, read_origin, write_origin
from gramian.train.state.saved_run import find_checkpoint
from tests.distill.teachers import contents
from tests.kit.matrix import FULL
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.distilled import cache_of, evaluations, metrics, student, teacher_run
from tests.train.test_distill_doctor import padded, taught

pytestmark = pytest.mark.xdist_group("distill")


def written(folder: Path, **sections: Any) -> str:
    """The path of a student's config."""
    path = folder / "student.toml"
    path.write_text(student(folder / "run", **sections).toml(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("source", ["hidden", "sampled", pytest.param("topk", marks=pytest.mark.full)])
def test_a_cache_is_written_beside_the_run_told_in_a_line_and_made_once(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, teacher={"source": source}, run={"steps": 10})
    assert main(["cache", config]) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    folder = tmp_path / "run-teacher"
    cache = open_cache(folder, kind=source)
    identity = cache.manifest.identity
    assert told.startswith(
        f"{folder}: {source}, {identity.count:,} windows of 24 tokens, {cache.manifest.bytes_per_token} bytes"
    )
    before = contents(folder)
    assert main(["cache", config]) == 0
    assert contents(folder) == before
    assert main(["train", config]) == 0
    assert len(metrics(tmp_path / "run")) == 10


def test_another_cache_in_the_folder_is_refused_by_the_field_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, teacher={"source": "hidden"})
    assert main(["cache", config]) == 0
    before = contents(tmp_path / "run-teacher")
    for override, field in (
        ("data.length=12", "windows"),
        ("teacher.source=sampled", "kind"),
        ("teacher.dtype=fp32", "hidden_dtype"),
    ):
        capsys.readouterr()
        assert main(["cache", config, override]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"holds another cache ({field} is" in told
    assert contents(tmp_path / "run-teacher") == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), 'teacher.source: "live" needs no cache; expected "hidden", "topk" or "sampled"'),
        (("teacher.source=hidden", "teacher.path="), "teacher.path: expected the folder of the teacher's model"),
        (("run.device=cuda", "teacher.source=hidden"), "run.device: there is no CUDA device here"),
    ],
)
def test_what_cannot_be_cached_is_one_line(
    overrides: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    assert main(["cache", config, *overrides]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gramian: {says}") and told.count("\n") == 1
    assert not (tmp_path / "run-teacher").exists()


def test_a_config_without_a_teacher_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 100\n")
    assert main(["cache", str(tmp_path / "run.toml")]) == 2
    assert capsys.readouterr().err == "gramian: teacher: expected a config with [teacher], or --tokens\n"


PIPELINES: dict[str, dict[str, Any]] = {
    "both from folders": {"model": "huggingface", "source": "hidden", "features": True},
    "goose from a padded folder": {"model": "goose", "source": "topk"},
    "goose with a tied head from a padded folder": {"model": "goose", "source": "sampled", "tied": True},
    "a tied GPT from a padded folder": {"model": "gpt", "source": "hidden", "tied": True, "features": True},
    "a folder from goose": {"model": "huggingface", "source": "topk", "teacher": "goose"},
}


@pytest.mark.parametrize("kind", PIPELINES if FULL else list(PIPELINES)[:1])
def test_cache_train_and_eval_work_with_any_student_and_teacher(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of 384 rows teach 257 ids; what the caches hold is of those alone, where that is all a student asks for."""
    told = PIPELINES[kind]
    model: dict[str, Any] = {"kind": told["model"], "tied": told.get("tied", False)}
    if told["model"] == "huggingface":
        model = {"kind": "huggingface", "path": str(padded(tmp_path / "student", 320)), "width": 128}
    path = teacher_run(told["teacher"]) if "teacher" in told else padded(tmp_path / "teacher", 384)
    teacher: dict[str, Any] = {"path": str(path), "source": told["source"]}
    if "features" in told:
        teacher |= {"features": "hidden", "feature_pairs": [[1, 1]]}
    config = written(tmp_path, model=model, teacher=teacher, run={"steps": 20}, eval={"every": 10, "windows": 4})
    assert main(["cache", config]) == 0
    if told["source"] != "hidden":
        assert open_cache(tmp_path / "run-teacher").manifest.identity.vocabulary == 257
    assert main(["train", config]) == 0
    lines = metrics(tmp_path / "run")
    assert lines[-1]["kl"] < lines[0]["kl"]
    assert ("teacher_cka" in evaluations(tmp_path / "run")[-1]) == (told["source"] == "hidden")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--windows", "2", "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["step"] in (10, 20)
    assert main(["eval", config, "--prompt", "the student", "--tokens", "9", "--temperature", "5"]) == 0
    assert "the student" in capsys.readouterr().out


def test_a_cache_of_a_teacher_that_was_trained_further_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(teacher_run(), teacher)
    config = written(tmp_path, teacher={"source": "hidden", "path": str(teacher)}, run={"steps": 10})
    assert main(["cache", config]) == 0
    assert (
        main(["train", config, "run.folder=" + str(tmp_path / "first"), f"teacher.cache={tmp_path}/run-teacher"]) == 0
    )
    shutil.rmtree(find_checkpoint(teacher, "teacher.path")[1].folder)  # another one is the best from now on
    capsys.readouterr()
    assert main(["train", config]) == 2
    assert "is not, or no longer, what the cache" in capsys.readouterr().err
    shutil.rmtree(teacher)  # a cache needs no teacher
    assert main(["train", config]) == 0


@pytest.mark.parametrize("place", [0.37, *(pytest.param(end, marks=pytest.mark.full) for end in (0.0, 1.0))])
def test_one_flipped_bit_of_a_shard_is_refused_by_file_name(
    place: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, told = tmp_path / "cache", {"source": "hidden", "cache": str(tmp_path / "cache")}
    shutil.copytree(cache_of("hidden"), folder)
    config = written(tmp_path, teacher=told, run={"steps": 10})
    for file in sorted(path for path in folder.glob("shards/*") if path.suffix != ".json"):
        whole = bytearray(file.read_bytes())
        at = round(place * (8 * len(whole) - 1))
        whole[at // 8] ^= 1 << at % 8
        file.write_bytes(whole)
        for command in ("train", "cache"):
            capsys.readouterr()
            assert main([command, config]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and f"{file} its checksum differs; expected it as it was" in error
        (check,) = taught(teacher=told).values()
        assert check.name == "cache files" and not check.ok and f"{file} its checksum differs" in check.hint
        file.unlink()  # as the line says
        assert main(["cache", config]) == 0
    assert main(["train", config]) == 0
    assert all(check.ok for check in taught(teacher=told).values())


def test_the_checksum_of_a_shard_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def refuse(folder: Path, records: dict[str, Any], *, content: bool) -> None:
        compared.extend(name for name in records if content and name.startswith("shards/"))

    monkeypatch.setattr("gramian.distill.cache.reader.refuse_damage", refuse)
    cache = open_cache(cache_of("hidden"))
    assert compared == []
    for _ in range(2):
        cache({"windows": torch.arange(cache.manifest.identity.count)})
    assert cache.verify() == len(compared) == len(set(compared)) > 0


def test_marks_follow_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(5_000_000))
    marks = {fingerprint([tmp_path / "a.safetensors"])}
    for place in (0, 2_500_000, 4_999_999):
        content = bytearray(5_000_000)
        content[place : place + 100_000] = b"1" * len(content[place : place + 100_000])
        (tmp_path / "a.safetensors").write_bytes(content)
        marks.add(fingerprint([tmp_path / "a.safetensors"]))
    assert len(marks) == 4
    assert read_origin(tmp_path) is None
    write_origin(tmp_path, "mark")
    assert read_origin(tmp_path) == "mark"
    monkeypatch.setattr(os, "open", refused)
    write_origin(tmp_path, "mark")  # nothing to write
    with pytest.raises(GramianError, match="^cache: .* cannot be written .Read-only file system.; expected"):
        write_origin(tmp_path, "another")


def refused(*_: Any) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
