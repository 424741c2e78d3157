"""Small distilled runs: a teacher that is trained once per process of the tests, caches of it, students of it."""

import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gramian.cli import main
from gramian.train.build.run_parts import Parts
from gramian.train.config.config import Config
from gramian.train.loop.objective import Measured
from gramian.train.state.run_folder import read_lines
from tests.train.runs import run, small

WORDS = [*"the student reads what its teacher says and has read of a warm day".split(), "in may\n"]  # noqa: SIM905
LEARNED: dict[str, Any] = {"temperature_kind": "learnable", "temperature_rate": 0.5}


@functools.cache
def scratch() -> Path:
    """A folder of this process of the tests."""
    path = Path(tempfile.mkdtemp(prefix="distilled-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def data(documents: int = 120) -> dict[str, Any]:
    """[data] of some 10 kB: documents of 5 to 200 bytes, so that rows differ in how much of them counts."""
    draw, folder = random.Random(0), scratch() / f"text-{documents}"
    folder.mkdir()
    for split, count in (("training", documents), ("validation", 24)):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    files = {
        name: [str(folder / f"{split}.jsonl")]
        for name, split in (("files", "training"), ("validation_files", "validation"))
    }
    return {"source": "jsonl", **files, "length": 24, "tokenizer": "bytes"}


@functools.cache
def teacher_run(kind: str = "gpt") -> Path:
    """A run whose model can teach: better than chance, narrower than no student of these tests."""
    folder = scratch() / f"teacher-{kind}"
    model = {"kind": kind, "width": 24, "layers": 2, "tied": kind == "goose", "dropout": 0.1}
    run(small(folder, run={"steps": 40, "log_every": 10}, model=model, data=data(), optimizer={"lr": 1e-2}))
    return folder


def student(folder: Path | str = "run", **sections: dict[str, Any]) -> Config:
    """The small run with that teacher."""
    told: dict[str, dict[str, Any]] = {"model": {"width": 16}, "data": {}, "teacher": {}, **sections}
    told["data"] = {**data(), **told["data"]}
    told["model"] = {"width": 16, **told["model"]}
    told["teacher"] = {"path": str(teacher_run()), **told["teacher"]}
    return small(folder, **told)


@functools.cache
def cache_of(source: str, layers: tuple[int, ...] = (), **changed: Any) -> Path:
    """A cache of that teacher."""
    folder = scratch() / f"cache-{source}-{'-'.join(map(str, (*layers, *changed.values())))}"
    features = {"features": "cka", "feature_pairs": [[i, layer] for i, layer in enumerate(layers)]} if layers else {}
    config = student(scratch() / "none", data=changed, teacher={"source": source, "cache": str(folder), **features})
    path = folder.with_suffix(".toml")
    path.write_text(config.toml(), encoding="utf-8")
    assert main(["cache", str(path)]) == 0
    return folder


def metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Lines of steps."""
    return [line for line in read_lines(Path(folder) / "metrics.jsonl") if "loss" in line]


def evaluations(folder: Path | str) -> list[dict[str, Any]]:
    """Lines of evaluations."""
    return [line for line in read_lines(Path(folder) / "metrics.jsonl") if "validation_loss" in line]


def validating(monkeypatch: pytest.MonkeyPatch, losses: Callable[[int], float]) -> None:
    """Validation losses by the number of evaluations before; the teacher, which has its own, is trained first."""
    teacher_run()
    asked: list[int] = []

    def evaluate(parts: Parts, windows: int) -> Measured:
        asked.append(1)
        return Measured(100 * losses(len(asked) - 1), 100)

    monkeypatch.setattr("gramian.train.loop.trainer.evaluate", evaluate)
