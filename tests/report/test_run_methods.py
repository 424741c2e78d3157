"""`gramian train CONFIG --methods`: the Methods page of a run says what its files say, and says so where they do not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gramian.cli import main
from gramian.report.run_data import RunData, read_run
from gramian.report.run_methods import run_methods, write_run_methods
from tests.analysis.test_methods import ITEMS
from tests.report import run_folders
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.runs import small

TINY: dict[str, Any] = {
    "model": {"layers": 1, "width": 8, "heads": 1},
    "data": {"length": 8, "batch": 4},
    "eval": {"every": 100, "windows": 2},
    "schedule": {"warmup": 1},
    "run": {"steps": 4, "seed": 3},
    "kfac": {"update_freq": 2, "kl_clip": 1e-8, "max_condition_number": 20.0},
}
FILES = ("record.json", "metrics.jsonl", "events.jsonl", "report.html")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that wrote its page at its end; beside the folder its config."""
    folder = tmp_path_factory.mktemp("methods") / "run"
    config = folder.with_suffix(".toml")
    config.write_text(small(folder, **TINY).toml())
    assert main(["train", str(config), "--methods"]) == 0
    return folder


def test_every_fact_is_that_of_the_record(trained: Path) -> None:
    page, record = (trained / "methods.md").read_text(), json.loads((trained / "record.json").read_text())
    kfac = record["kfac"]
    checks = [line[6:].partition(": ")[0] for line in page.splitlines() if line.startswith("- [x] ")]
    assert checks[-len(ITEMS) :] == ITEMS and {"Configuration", "Data", "Seeds", "Versions and device"} <= {*checks}
    for text in (
        f"a gpt model with {record['parameters']:,} parameters (1 layers, 1 heads, width 8)",
        f"{record['windows']['training']:,} windows of 8 tokens",
        "4 of 4 steps were taken, on 128 tokens, in fp32",
        "2 refreshes in 4 steps, 0 dropped",
        "A trust region of 1e-08 nats scales down 4 of the 4 logged steps.",
        f"hash {record['config_hash']}",
        f"training {record['data_digest']['training']}",
        f"gramian {record['gramian']}, PyTorch {record['torch']}",
        "1 process, seed 3.",
        "Condition number clipping (κ_max): 20",
        "damping = 0.03, damping_mode = pi, max_condition_number = 20.0",
    ):
        assert text in page, text
    clips = [side["clip"] for layer in kfac["layers"].values() for side in layer["sides"].values() if side["clip"]]
    share = sum(clip["count"] for clip in clips) / sum(clip["total"] for clip in clips)
    assert share > 0 and f"the clip at κ_max = 20 raises {share:.2%} of the eigenvalues" in page
    lambdas = [layer["lambda_G"] for layer in kfac["layers"].values()]
    assert f"λ_G from {min(lambdas):.4g} to {max(lambdas):.4g}" in page
    for name, layer in kfac["layers"].items():
        row = next((line for line in page.splitlines() if line.startswith(f"| {name} | ")), None)
        assert (row is not None) == ("A" in layer["sides"])
        assert row is None or f"| {layer['lambda_A']:.4g} | {layer['lambda_G']:.4g} |" in row


def changed(run: RunData, **fields: Any) -> RunData:
    """The run with other values in its files; None removes one."""
    record = {key: value for key, value in {**run.record, **fields}.items() if value is not None}
    return dataclasses.replace(run, record=record)


def test_the_page_follows_the_files_and_nothing_else(trained: Path) -> None:
    run = read_run(trained, "run")
    kfac = json.loads(json.dumps(run.record["kfac"]))
    kfac["options"] |= {"update_freq": 77, "kfac_policy": "hybrid", "max_condition_number": 1234.0}
    kfac |= {"refreshes": 555, "world_size": 7, "kl_clip": None}
    page = run_methods(changed(run, kfac=kfac, parameters=98765, processes=7, strategy="ddp", torch="9.9"))
    for text in (
        "98,765 parameters", "every 77 steps (555 refreshes", 'policy "hybrid"', "κ_max): 1234", "PyTorch 9.9",
        "7 processes (ddp), seed 3", "World size (for multi-GPU): 7",
    ):  # fmt: skip
        assert text in page, text
    assert "trust region" not in page and "nothing was joined" not in page
    assert 'damped with λ = 0.03 ("pi")' in page
    kfac["options"] |= {"damping_mode": "factored", "damping_A": 0.1, "damping_G": 0.001}
    page = run_methods(changed(run, kfac=kfac))
    assert 'damped with λ_A = 0.1 and λ_G = 0.001 ("factored")' in page and "λ = 0.03" not in page
    config = {**run.config, "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.25, "max_norm": 0.0}}
    page = run_methods(dataclasses.replace(run, config=config))
    assert "SGD with momentum 0.25 on natural gradients with a peak learning rate of 0.5" in page
    assert "weight decay not recorded on matrices and gradients of any norm" in page
    bare = run_methods(changed(run, kfac=None, data_digest=None, config_hash=None))
    assert "K-FAC: not recorded." in bare and "- [ ] Data: not recorded: no digests" in bare
    assert "- [ ] Configuration: not recorded" in bare and "# Per layer" not in bare


def test_of_a_complete_run_the_page_alone_is_written(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, before = (trained / "methods.md").read_text(), {name: (trained / name).read_bytes() for name in FILES}
    (trained / "methods.md").unlink()
    times = {name: (trained / name).stat().st_mtime_ns for name in FILES}
    config = str(trained.with_suffix(".toml"))
    assert main(["train", config, "--methods"]) == 0
    assert capsys.readouterr().out == f"methods: {trained / 'methods.md'}\n"
    assert (trained / "methods.md").read_text() == page
    assert {name: (trained / name).stat().st_mtime_ns for name in FILES} == times
    assert main(["train", config, "run.seed=4", "--methods"]) == 2  # another run
    assert "run.folder: " in capsys.readouterr().err
    assert main(["train", config]) == 0  # resumed and done: the record keeps what was clipped
    kept = json.loads((trained / "record.json").read_text())["kfac"]
    assert kept == json.loads(before["record.json"])["kfac"]


def test_private_and_plain_runs_have_their_facts(tmp_path: Path) -> None:
    path = write_run_methods(run_folders.private(tmp_path / "private"))
    private = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600 and "validation losses above are not covered by ε" in private
    assert "Training is private (DP-SGD): noise multiplier 1," in private and "ε = 6 at δ = 1e-05" in private
    assert "no digests of private data" in private and "K-FAC" not in private
    plain = run_methods(read_run(run_folders.plain(tmp_path / "plain"), "plain"))
    assert "Number of rollbacks: 1. The run ended: done." in plain and "K-FAC" not in plain
