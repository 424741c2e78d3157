"""What is made of the numbers."""

import dataclasses
import json
from pathlib import Path

import pytest

from gramian.cli.demo.demo_plan import DemoPlan, hashes_of, runs_of
from gramian.cli.demo.demo_result import (
    FILE,
    Cached,
    Checked,
    Curved,
    DemoRow,
    Result,
    Sample,
    Score,
    Spent,
    read_result,
    verdict,
    write_result,
)
from gramian.cli.demo.pipeline import training_seconds
from gramian.core.errors import GramianError
from gramian.train.config.config import load_config
from tests.cli.small_demo import small


def result(alone: float = 2.2, distilled: float = 2.1, teacher: float = 1.9, seconds: float = 15.0) -> Result:
    def row(name: str, loss: float, seconds: float = 10.0) -> DemoRow:
        return DemoRow(name, f"out/{name}", 100, 50, seconds, Score(1000, loss, 9.0, 8.0, 0.5, None, 0.1))

    return Result(
        hashes={"teacher": "a"},
        versions={"torch": "2"},
        device="cpu",
        threads=2,
        seconds={"doctor": 1.0},
        checks=(Checked("targets", "0", "0", True),),
        cache=Cached("out/cache", 10, 16, 64, 1e-4),
        teacher=row("teacher", teacher),
        distilled=row("distilled", distilled, seconds),
        alone=row("alone", alone),
        private=row("private", 3.0),
        privacy=Spent(2.9, 1e-5, True),
        curvature=Curved("out/teacher/curvature", 0.03, 12.0, 3.0),
        samples=(Sample("teacher", "def é\n"),),
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write_result(result(), tmp_path)
    assert read_result(tmp_path) == result()
    told = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert told["gain"] == pytest.approx(0.1)
    assert told["verdict"] == verdict(result())


def test_a_folder_without_a_result_has_none(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {}}', '{"hashes": 1}'])
def test_another_file_of_that_name_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(GramianError, match=r"--out.*demo\.json.*expected"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("distilled", "said"),
    [
        (2.10, ["distilled student beats its CE-only twin", "0.100 nats", "perplexity 9.5 % lower", "33% of the way"]),
        (2.30, ["CE-only student beats its distilled twin", "0.100 nats", "10.5 % higher"]),
        (2.195, ["tie", "0.005 nats"]),
        (2.205, ["tie", "0.005 nats"]),
    ],
)
def test_the_verdict_names_the_winner(distilled: float, said: list[str]) -> None:
    text = verdict(result(distilled=distilled))
    for part in said:
        assert part in text
    assert "15 s against 10 s" in text
    assert ("beats" in text) != ("tie" in text)


def test_a_student_above_its_teacher_is_not_on_the_way_to_it() -> None:
    assert "of the way" not in verdict(result(teacher=2.3))


def test_seconds_of_several_processes_add_up(tmp_path: Path) -> None:
    elapsed = [1.0, 2.0, None, 3.5, 0.5, 1.5, None, 0.25]
    lines = [{"step": 1, "time": {} if at is None else {"elapsed": at}} for at in elapsed]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training_seconds(tmp_path) == pytest.approx(3.5 + 1.5 + 0.25)
    assert training_seconds(tmp_path / "nowhere") == 0.0


@pytest.mark.parametrize("plan", [DemoPlan(), small()], ids=["default", "small"])
def test_students_differ_by_their_teacher_alone(plan: DemoPlan, tmp_path: Path) -> None:
    runs = runs_of(plan, tmp_path)
    assert dataclasses.replace(runs.distilled, teacher=None).hash == runs.alone.hash
    assert runs.distilled.teacher is not None
    assert Path(runs.distilled.teacher.path) == Path(runs.teacher.run.folder)
    assert runs.distilled.data == runs.teacher.data
    for config in vars(runs).values():
        path = tmp_path / "config.toml"
        path.write_text(config.toml(), encoding="utf-8")
        assert load_config(path) == config


def test_hashes_tell_seeds_apart_and_not_folders() -> None:
    assert hashes_of(small()) == hashes_of(small())
    assert not set(hashes_of(small()).values()) & set(hashes_of(small(seed=1)).values())
