"""What others can read of a private run: nothing that tells apart data sets that differ in one record, and no key."""

import json
import shutil
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gramian.analysis.subject import from_config
from gramian.cli import main
from gramian.train.config.config import Config, load_config
from gramian.train.state.checkpoint_files import digest_of, write_tensors
from gramian.train.state.run_folder import read_lines
from tests.train.runs import PRIVATE, small

pytestmark = pytest.mark.xdist_group("published")  # two finished runs for all

COMPUTED = ("grad_norm", "time", "clock", "seconds", "share_of_time_by_interval", "attempt")
"""Of a line of metrics or events: the noised gradient, what the clock says, and how far the run was when a save was done."""
CLOCKED = ("checkpoint_waited", "data_starved")
"""Events that a slow machine writes, and a fast one does not."""


def private_run(folder: Path, last_word: str, steps: int = 6) -> Config:
    """`gramian train` on a text that ends in this word."""
    (folder / "a.txt").write_text("".join(f"{7919 * i % 10007:05d} " for i in range(700)) + last_word)
    (folder / "b.txt").write_text("xyz " * 500 + last_word)
    files = {"source": "text", "files": [str(folder / "a.txt")], "validation_files": [str(folder / "b.txt")]}
    config = small(
        folder / "run",
        run={"steps": steps, "deterministic": True},
        model={"layers": 1, "width": 16},
        data={**files, "length": 16},
        privacy=PRIVATE,
        checkpoint={"snapshot_every": 2, "every": 2},
        eval={"every": 100},
    )
    (folder / "run.toml").write_text(config.toml())
    assert main(["train", str(folder / "run.toml")]) == 0
    return config


def public(folder: Path) -> dict[str, str]:
    """Text of the files that others may read."""
    readable = {}
    for path in sorted((folder / "run").rglob("*")):
        parents = [p for p in path.parents if folder / "run" in (p, *p.parents)]
        modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, *parents)]
        if path.is_file() and all(mode & 0o044 for mode in modes):
            readable[str(path.relative_to(folder))] = path.read_text()
    return readable


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]], list[dict[str, str]]]:
    """What others read of two runs in one folder, and their figures; one after the other, on data that differs in its last
    record."""
    folder, texts, lines = tmp_path_factory.mktemp("private"), [], []
    for word in ("abc ", "abd "):
        shutil.rmtree(folder / "run", ignore_errors=True)
        private_run(folder, word)
        texts.append(public(folder))
        lines.append({path.name: path.read_text() for path in (folder / "run").glob("*.jsonl")})
    return folder, texts, lines


def test_files_that_others_read_do_not_tell_neighbouring_data_sets_apart(runs: Any) -> None:
    one, other = runs[1]
    assert set(one) == set(other) and {"run/record.json", "run/config.toml"} <= set(one)
    for name in one:
        assert one[name] == other[name], name


def test_figures_that_nothing_covers_are_where_only_the_owner_reads_and_say_so(runs: Any) -> None:
    one, other = runs[2]
    for name in ("metrics.jsonl", "events.jsonl"):
        assert stat.S_IMODE((runs[0] / "run" / name).stat().st_mode) == 0o600
        assert covered(one[name]) == covered(other[name]) != []


def covered(text: str) -> list[str]:
    """Lines without what is not covered by ε and says so, and without the clock; sorted, as saves end at any time."""
    found = []
    for line in map(json.loads, text.splitlines()):
        hidden = {*line.get("not_covered_by_epsilon", ()), *COMPUTED}
        if line.get("event") not in CLOCKED:
            found.append(json.dumps({key: value for key, value in line.items() if key not in hidden}))
    return sorted(found)


def test_the_digest_of_private_data_is_where_only_the_owner_reads(runs: Any) -> None:
    folder, texts, _ = runs
    facts = next((folder / "run" / "checkpoints").glob("step-*/facts.json"))
    digest = json.loads(facts.read_text())["data"]["training"]
    assert len(digest) == 32 and not any(digest in text for text in texts[1].values())
    for path in (facts, folder / "run" / "releases.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_analysis_of_a_private_run_has_no_digest_of_its_data(runs: Any) -> None:
    config = load_config(runs[0] / "run.toml")
    subject = from_config(config, torch.device("cpu"), None, tokens=64, rows=None)
    assert "digest" not in subject.data_facts and subject.data_facts["files"]


def test_other_private_data_is_noticed_on_a_resume_all_the_same(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs[0] / "a.txt"
    before = path.read_text()
    path.write_text(before[:-2] + "e ")
    assert main(["train", str(runs[0] / "run.toml")]) == 2
    assert "the training data is not, or not known to be, that of" in capsys.readouterr().err
    path.write_text(before)
    assert main(["train", str(runs[0] / "run.toml")]) == 0


@pytest.mark.full
def test_a_resume_from_other_weights_replays_nothing_and_says_so(tmp_path: Path) -> None:
    """From a checkpoint of step 4 in which one weight was changed, and the checksums with it."""
    private_run(tmp_path, "abc ")
    run = tmp_path / "run"
    *_, older, newest = sorted((run / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)
    tensors = load_file(older / "state.safetensors")
    name = next(name for name, t in tensors.items() if name.startswith("model.") and t.dim() == 2)
    tensors[name][0, 0] += 1.0
    (older / "state.safetensors").unlink()
    written = write_tensors(older / "state.safetensors", tensors)
    body = json.loads((older / "manifest.json").read_text())["manifest"]
    body["files"]["state.safetensors"] = asdict(written)
    (older / "manifest.json").write_text(json.dumps({"manifest": body, "sha256": digest_of(body)}))
    assert json.loads((run / "releases.json").read_text())["begun"] == 6
    with pytest.warns(UserWarning, match="^replay: weights, optimizer state .* nothing is replayed"):
        assert main(["train", str(tmp_path / "run.toml")]) == 0
    told = [line for line in read_lines(run / "events.jsonl") if line["event"] == "not_replayed"]
    assert len(told) == 1 and "weights" in told[0]["reason"]
    assert json.loads((run / "releases.json").read_text())["begun"] == 8, "past every step begun"
