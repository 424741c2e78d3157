"""Private runs: what is proven before the first release, what the record says of it, and which figures decide."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.errors import GramianError
from gramian.train.build import Parts
from gramian.train.config import Config, load_config
from gramian.train.private import PrivateStepper
from tests.train.runs import PRIVATE, small
from tests.train.test_faults import run


def private(folder: Path, steps: int = 6, **keys: Any) -> Config:
    return small(
        folder,
        run={"steps": steps},
        model={"layers": 1, "width": 16},
        data={"length": 16, "batch": 4},
        schedule={"warmup": 1},
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


def test_a_failed_repetition_stays_in_the_record_of_the_resumed_run(tmp_path: Path) -> None:
    config, fail = private(tmp_path / "run", proof=1), [1]
    with pytest.raises(GramianError, match="when other samples are replaced"):
        run(config, mixes_from(3, fail))
    reasons = ["releases from 2 up to 3: a repeated row proof failed before the last"]
    assert told(config)["proof"]["releases not covered"] == [2, 3]
    assert (told(config)["epsilon"], told(config)["epsilon_not_valid_because"]) == ("not valid", reasons)
    fail.clear()
    assert run(config, mixes_from(3, fail))[1].reason == "done"
    assert (told(config)["epsilon"], told(config)["epsilon_not_valid_because"]) == ("not valid", reasons)
    assert told(config)["proof"]["rows"] == "proven"
