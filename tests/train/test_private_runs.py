"""Private runs: what is proven before the first release, what the record says of it, and which figures decide."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.report.report_file import write_run_report
from gramian.report.run_methods import write_run_methods
from gramian.train.build.memory_needs import needs_of
from gramian.train.build.run_parts import Parts
from gramian.train.config.config import Config, load_config, parse_config
from gramian.train.loop import trainer as trainer_module
from gramian.train.loop.objective import Measured
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.state.run_folder import read_lines
from tests.kit.refusals import refusal
from tests.train.runs import PRIVATE, events, run, small


def private(folder: Path, steps: int = 6, precision: str = "fp32", **keys: Any) -> Config:
    return small(
        folder,
        run={"steps": steps},
        model={"layers": 1, "width": 16},
        data={"length": 16, "batch": 4},
        schedule={"warmup": 1},
        precision={"kind": precision},
        eval={"every": 10},
        privacy={**PRIVATE, **keys},
    )


def told(config: Config) -> dict[str, Any]:
    """What the record says of privacy."""
    found: dict[str, Any] = json.loads((Path(config.run.folder) / "record.json").read_text())["privacy"]
    return found


def mixes_from(step: int, fail: list[int]) -> Any:
    """From a release on, the windows of a batch see each other."""

    def fault(parts: Parts) -> None:
        assert isinstance(parts.stepper, PrivateStepper)
        engine = parts.stepper.engine

        def mix(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if engine.released < step or not fail:
                return output
            return output + output.mean(0, keepdim=True)

        parts.model.blocks[0].register_forward_hook(mix)  # type: ignore[index, union-attr]

    return fault


# ---- the row proof ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proof", ["auto", "off", 50])
def test_the_config_says_what_is_proven(proof: str | int, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(private(tmp_path / "run", proof=proof).toml())
    assert load_config(tmp_path / "run.toml").privacy == private(tmp_path / "run", proof=proof).privacy


@pytest.mark.parametrize("proof", ["on", 0, -3, True, 1.5])
def test_a_proof_that_is_none_is_named_in_one_line(
    proof: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(private(tmp_path / "run").toml())
    assert main(["train", str(tmp_path / "run.toml"), f"privacy.proof={json.dumps(proof)}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "privacy.proof: expected" in line and str(proof) in line


def test_gramian_train_proves_rows_and_loss_before_it_releases_anything(tmp_path: Path) -> None:
    config, seen = private(tmp_path / "run"), []

    def fault(parts: Parts) -> None:
        assert isinstance(parts.stepper, PrivateStepper)
        engine, plain = parts.stepper.engine, parts.stepper.engine.check_independence

        def check(loss_fn: Any, batch: Any) -> None:
            plain(loss_fn, batch)
            seen.append((engine.steps, len(batch["tokens"])))
            loss = loss_fn(parts.module, batch)  # the run's own: Σ −log p / T
            with torch.no_grad():
                _, nats = parts.module(batch["tokens"], batch["targets"], 1.0)
            torch.testing.assert_close(loss.detach(), nats / config.data.length)

        engine.check_independence = check  # type: ignore[method-assign]

    run(config, fault)
    assert seen == [(0, 4)]
    proof = told(config)["proof"]
    assert (proof["rows"], proof["loss"]) == ("proven", "proven")
    (structure,) = proof["structures"]
    bits = max(1, (structure["samples"] - 1).bit_length())
    assert structure["runs"] == 2 * bits + 4
    assert proof["not_covered_by_epsilon"] == ["samples", "runs"]  # they tell how large a draw was


def test_no_proof_is_recorded_and_warned_of(tmp_path: Path) -> None:
    config = private(tmp_path / "run", proof="off")
    with pytest.warns(UserWarning, match='proof: is "off"'):
        run(config)
    proof = told(config)["proof"]
    assert (proof["rows"], proof["loss"], proof["structures"]) == ("off", "not proven", [])


def test_windows_that_see_each_other_are_refused_before_the_first_release(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="when other samples are replaced"):
        run(private(tmp_path / "run"), mixes_from(0, [1]))
    assert not list((tmp_path / "run").glob("metrics.jsonl")) or not (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.full
def test_a_failed_repetition_stays_in_the_record_of_the_resumed_run(tmp_path: Path) -> None:
    config, fail = private(tmp_path / "run", proof=1), [1]
    with pytest.raises(GramianError, match="when other samples are replaced"):
        run(config, mixes_from(3, fail))
    reasons = ["releases from 2 up to 3: a repeated row proof failed"]
    assert told(config)["proof"]["releases not covered"] == [2, 3]
    assert (told(config)["epsilon"], told(config)["epsilon_not_valid_because"]) == ("not valid", reasons)
    fail.clear()
    assert run(config, mixes_from(3, fail))[1].reason == "done"
    assert (told(config)["epsilon"], told(config)["epsilon_not_valid_because"]) == ("not valid", reasons)
    assert told(config)["proof"]["rows"] == "proven"


# ---- correlated noise --------------------------------------------------------------------------------------------------


def test_correlated_noise_is_planned_recorded_and_its_releases_are_fixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = private(tmp_path / "run", noise="bandmf", bands=3, proof="off")
    with pytest.warns(UserWarning, match='proof: is "off"'):
        run(config)
    noise = told(config)["noise"]
    assert (noise["name"], noise["bands"], noise["groups"], noise["releases"]) == ("bandmf", 3, 3, 6)
    assert noise["prefix error"] < 0.9 * noise["of independent noise"] == 0.9 * math.sqrt(7 / 2)
    ledger = json.loads((tmp_path / "run" / "releases.json").read_text())["about"]["chain"]["runs"]
    assert (
        ledger[0][1] == 6 and ledger[0][0] | {"noise": "bandmf", "bands": 3, "groups": 3, "releases": 6} == ledger[0][0]
    )
    assert write_run_report(tmp_path / "run", private=True) is None
    assert "bandmf, 3 bands" in (tmp_path / "run" / "report.html").read_text()
    assert "(bandmf over 3 releases)" in write_run_methods(tmp_path / "run").read_text()
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["plan", str(tmp_path / "run.toml")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "noise bandmf over 3 releases: 2 buffers" in shown
    parameters = needs_of(config, 257, "fp32", "cpu").shape.parameters
    assert noise["bytes"] == 2 * 4 * parameters == needs_of(config, 257, "fp32", "cpu").noise


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"noise": "bandmf"}, "privacy.bands: is not given"),
    ({"bands": 3}, "privacy.bands: is 3"),
    ({"noise": "bandmf", "bands": 7}, "privacy.bands: is 7; expected at most run.steps"),
    ({"noise": "bisr", "bands": 7, "clip_function": "adaptive"}, "privacy.clip_function: adaptive does not go"),
    ({"noise": "bisr", "bands": 7, "accountant": "gdp"}, "privacy.accountant: gdp does not go"),
    ({"noise": "bisr", "bands": 7, "accountant": "pld", "max_draw": 9}, "privacy.max_draw: 9 does not go"),
    ({"noise": "bisr", "bands": 7, "metric": "kfac"}, "privacy.metric: kfac does not go"),
]


@pytest.mark.parametrize("keys, line", REFUSED, ids=range(len(REFUSED)))
def test_keys_that_do_not_go_with_correlated_noise_are_named(keys: dict[str, Any], line: str, tmp_path: Path) -> None:
    with refusal(re.escape(line)):
        private(tmp_path / "run", **keys)


# ---- decisions -------------------------------------------------------------------------------------------------------


def changing(change: Callable[[int, torch.Tensor], None]) -> Callable[[Parts], None]:
    """What a step tells, changed by (its position, [Σ −log p, flags, tokens, gradient norm])."""

    def fault(parts: Parts) -> None:
        plain = parts.stepper.take

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            taken = plain(batch, rate, flag)
            change(batch.position, taken.values)
            return taken

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    return fault


def lies(position: int, values: torch.Tensor) -> None:
    values[0] = [math.nan, 1e6, 0.0][position % 3]


def longer(position: int, values: torch.Tensor) -> None:
    values[3] *= 1e4 if position == 28 else 1


def states(config: Config) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and optimizer of every checkpoint."""
    folders = sorted(Path(config.run.folder, "checkpoints").glob("*-*"))
    return {folder.name: load_file(folder / "state.safetensors") for folder in folders}


@pytest.mark.full
def test_no_figure_without_noise_changes_the_weights_or_which_of_them_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, lied = private(tmp_path / "clean", steps=30), private(tmp_path / "lied", steps=30)
    run(clean)
    nats = itertools.cycle([1.0, math.nan, 1e9])
    monkeypatch.setattr(trainer_module, "evaluate", lambda parts, windows: Measured(next(nats), 1))
    trainer, ended = run(lied, changing(lies))
    assert (ended.step, ended.reason, trainer.best) == (30, "done", None)
    assert not events(lied, "rollback") and not events(lied, "advice")
    before, after = states(clean), states(lied)
    assert before.keys() == after.keys()
    for name, tensors in before.items():
        assert all(torch.equal(t, after[name][key]) for key, t in tensors.items())
    assert (told(lied)["decisions"], told(lied)["epsilon"]) == ("noised", "as accounted")


@pytest.mark.full
def test_the_noised_gradient_and_the_weights_may_decide(tmp_path: Path) -> None:
    config = private(tmp_path / "gradient", steps=30)
    run(config, changing(longer))
    (event,) = events(config, "rollback")
    assert "gradient norm" in event["reason"] and "covered_by_epsilon" not in event
    assert told(config)["epsilon"] == "as accounted"

    config, broken = private(tmp_path / "weights", steps=12), []

    def break_weights(parts: Parts) -> None:
        plain = parts.stepper.take

        def take(batch: Any, rate: float, flag: bool = False) -> Any:
            taken = plain(batch, rate, flag)
            if batch.position == 8 and not broken:
                broken.append(parts.model.head.weight.data.fill_(math.nan))  # type: ignore[union-attr, operator]
            return taken

        parts.stepper.take = take  # type: ignore[method-assign, assignment]

    assert run(config, break_weights)[1].reason == "done"
    assert [event["reason"] for event in events(config, "rollback")] == ["a weight is not finite"]


def test_a_run_in_the_metric_of_public_files_records_what_it_rests_on(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text("a public sentence of no great interest. " * 200)
    curvature = {"update_freq": 3, "public_files": [str(tmp_path / "public.txt")], "precondition": False}
    config = small(
        tmp_path / "run",
        run={"steps": 4},
        model={"layers": 1, "width": 16},
        data={"length": 16, "batch": 4},
        schedule={"warmup": 1},
        kfac=curvature,
        privacy={**PRIVATE, "metric": "kfac", "proof": "off"},
    )
    run(config)
    metric = told(config)["metric"]
    assert metric["factors"] == "public, as the user says" and metric["refreshes"] == 2
    assert metric["share of trained elements"] > 0.9 and 0 < metric["rounding"] < 0.01
    joint = {"kfac": {**curvature, "damping_mode": "joint"}}
    for section, given in (("privacy.metric", {}), ("kfac.damping_mode", joint)):
        with pytest.raises(GramianError, match=rf"^{section}: "):
            parse_config({"privacy": {**PRIVATE, "metric": "kfac"}, **given})
    with pytest.raises(GramianError, match=r"^kfac.precondition: false leaves nothing to do"):
        parse_config({"kfac": {"precondition": False}})


def test_decisions_by_raw_losses_leave_epsilon_not_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = private(tmp_path / "run", steps=12, decisions="raw")
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert 'ε is not valid: privacy.decisions = "raw": rollbacks, ' in capsys.readouterr().out
    assert told(config)["epsilon"] == "not valid" and len(told(config)["epsilon_not_valid_because"]) == 1
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "epsilon" in line]
    assert lines and all(line["epsilon_not_valid"] for line in lines)
    assert run(config)[0].best is not None


def test_public_validation_may_choose_the_best(tmp_path: Path) -> None:
    config = private(tmp_path / "run", steps=12, decisions="public_validation")
    trainer, _ = run(config, changing(lies))
    assert trainer.best is not None and not events(config, "rollback")
    assert (told(config)["decisions"], told(config)["epsilon"]) == ("public_validation", "as accounted")


def test_a_part_of_the_private_data_is_not_public(tmp_path: Path) -> None:
    data = {"source": "text", "files": [str(tmp_path / "a.txt")]}
    keys = {"privacy": {**PRIVATE, "decisions": "public_validation"}}
    with pytest.raises(GramianError, match="^privacy.decisions: .*; expected data.validation_files"):
        small(tmp_path / "run", data=data, **keys)
    small(tmp_path / "run", data={**data, "validation_files": [str(tmp_path / "b.txt")]}, **keys)


@pytest.mark.full
def test_a_step_that_the_loss_scaler_leaves_out_leaves_epsilon_not_valid(tmp_path: Path) -> None:
    config = private(tmp_path / "run", precision="fp16")

    def fault(parts: Parts) -> None:
        stepper = parts.stepper
        assert isinstance(stepper, PrivateStepper) and stepper.scaler is not None
        scaler, plain, left_out = stepper.scaler, stepper.scaler.update, list[int]()

        def update() -> None:
            plain(scaler.get_scale() / 2 if stepper.engine.released == 2 and not left_out else None)
            left_out.extend([1] * (stepper.engine.released == 2))

        scaler.update = update  # type: ignore[method-assign, assignment]

    run(config, fault)
    assert told(config)["epsilon"] == "not valid"
    assert told(config)["epsilon_not_valid_because"] == [
        "the loss scaler left out steps by looking at sums without noise"
    ]
