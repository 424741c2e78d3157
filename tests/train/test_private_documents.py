"""Private runs whose unit is a document or a user: drawn, clipped and accounted for with all its windows."""

import copy
import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.cli import main
from gramian.core.errors import GramianError
from gramian.data import load_windows
from gramian.data.document_rows import DocumentWindows
from gramian.train.build.build_model import build_model
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config
from gramian.train.doctor.checks.private_windows import private_windows
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import Objective
from gramian.train.loop.precision import resolve_precision
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.verify.private_audit.audited_run import open_run
from tests.kit.refusals import refusal
from tests.train.runs import ONE, PRIVATE, run, small

PACKED = {"isolate": True}
PADDED = {"pack": False}
USERS = ["ann", 7, "7", "bo", 0]
"""Users of the documents in turn, of whom two are one: integers and texts name the same users."""


def documents(folder: Path, name: str) -> str:
    """A file of documents of 10 to 200 bytes."""
    path = folder / f"{name}.jsonl"
    texts = [f"{i} says " + "abc defgh "[: 2 + i % 9] * (i % 20) for i in range(16)]
    path.write_text("".join(json.dumps({"text": text, "by": USERS[i % 5]}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def private(folder: Path, data: dict[str, Any], steps: int = 2, precision: str = "fp32", **keys: Any) -> Config:
    return small(
        folder,
        run={"steps": steps},
        model={"layers": 1, "width": 16},
        data={
            "source": "jsonl",
            "files": [documents(folder.parent, "training")],
            "validation_files": [documents(folder.parent, "validation")],
            "length": 64,
            "batch": 2,
            "user": "by" if keys.get("unit") == "user" else "",
            **data,
        },
        schedule={"warmup": 1},
        precision={"kind": precision},
        eval={"every": 10, "windows": 2},
        privacy={**PRIVATE, "unit": "document", **keys},
    )


def stepper_of(config: Config) -> tuple[Parts, PrivateStepper]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = build(config, ONE)
    assert isinstance(parts.stepper, PrivateStepper)
    return parts, parts.stepper


@pytest.mark.oracle
@pytest.mark.parametrize("data", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("unit, batch", [("document", 8), ("user", 3)])
def test_a_step_is_the_clipped_sum_over_units(data: dict[str, Any], unit: str, batch: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": 1e-2, "proof": "off", "unit": unit}
    config = private(tmp_path / "run", {**data, "batch": batch}, precision="fp64", **settings)
    parts, stepper = stepper_of(config)
    windows = DocumentWindows(load_windows(config.data)[0])
    lines = [json.loads(line) for line in Path(config.data.files[0]).read_text().splitlines()]
    own = [str(lines[d]["by"]) if unit == "user" else str(d) for d in windows.documents.tolist()]
    numbers = list(dict.fromkeys(own))
    assert stepper.engine.sample_rate == batch / len(numbers) and len(numbers) == (4 if unit == "user" else 16)
    plain = copy.deepcopy(parts.model)
    draw = next(stepper.draws())
    (piece,) = list(draw.pieces)
    last = stepper._loader._last[0]
    drawn = sorted(set(last.units or []))
    assert drawn and len(last.indices) > len(drawn)  # some have several windows
    total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for number in drawn:
        plain.zero_grad()
        for i in range(len(windows)):
            if own[i] == numbers[number]:
                item = windows[i]
                Objective(plain)(item["tokens"][None], item["targets"][None], 1 / 64)[0].backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
        norm = float(torch.stack([g.square().sum() for g in found.values()]).sum().sqrt())
        for name, g in found.items():
            total[name] += min(1.0, 1e-2 / norm) * g
    stepper.optimizer.zero_grad()
    loss, _ = stepper.loss(stepper.module, piece)
    stepper.engine.backward(loss)
    assert len(stepper.engine.last.norms_B) == len(drawn)  # type: ignore[union-attr]
    for name, p in parts.model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, total[name], rtol=1e-7, atol=1e-12)
    stepper.engine.detach()


@pytest.mark.parametrize("data", [PACKED, pytest.param(PADDED, marks=pytest.mark.full)], ids=["packed", "padded"])
def test_a_run_trains_and_says_what_its_unit_is(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = private(tmp_path / "run", data, max_records_per_unit=2, max_physical_batch="auto")
    run(config)
    record = json.loads((tmp_path / "run" / "record.json").read_text())["privacy"]
    assert (record["unit"], record["adjacency"]) == ("one document", "add or remove one unit")
    assert record["max_records_per_unit"] == 2 and record["max_physical_batch"] > 2
    assert (record["proof"]["rows"], record["proof"]["loss"]) == ("proven", "proven")
    units = len(set(DocumentWindows(load_windows(config.data)[0]).documents.tolist()))
    assert record["sample_rate"] == 2 / units and record["expected_batch"] == 2
    ledger = json.loads((tmp_path / "run" / "releases.json").read_text())["about"]["chain"]["runs"]
    assert ledger[0][0]["adjacency"] == "add or remove one unit" and ledger[0][1] == 2
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "for one document of text" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["plan", str(tmp_path / "run.toml")]) == 0
    assert "unit of privacy: one document" in capsys.readouterr().out


@pytest.mark.oracle
def test_the_part_of_each_layer_is_clipped_to_the_norm_of_its_rule(tmp_path: Path) -> None:
    def sums(rules: tuple[str, ...], limit: float) -> tuple[dict[str, Tensor], PrivateStepper]:
        keys = {"clip_function": "per_layer", "layer_norms": rules, "max_grad_norm": limit, "proof": "off"}
        config = private(tmp_path / "run", {**PADDED, "batch": 1}, precision="fp64", noise_multiplier=0.0, **keys)
        parts, stepper = stepper_of(config)
        rows = {name: t[:1] for name, t in stepper.some_rows(2).items()}
        stepper.loss(stepper.module, rows)[0].backward()
        made = {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}
        stepper.engine.detach()
        return made, stepper

    plain, _ = sums((), 1e9)
    clipped, stepper = sums(("*.head*=3", "*.blocks.0*=0.5", "*=1"), 1e-3)
    layers: dict[str, list[str]] = {}
    for name in plain:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    weights = {layer: 3.0 if "head" in layer else 0.5 if "blocks.0" in layer else 1.0 for layer in layers}
    total = sum(weight**2 for weight in weights.values()) ** 0.5
    assert set(weights.values()) == {0.5, 1.0, 3.0}
    for layer, names in layers.items():
        norm = float(torch.cat([plain[name].flatten() for name in names]).norm())
        factor = min(1.0, 1e-3 * weights[layer] / total / norm)
        for name in names:
            torch.testing.assert_close(clipped[name], factor * plain[name], rtol=1e-8, atol=1e-14)
    for rules, words in (
        (("blocks*=1",), "has no rule for "),
        (("*=1", "*none*=2"), "no layer takes '\\*none\\*=2'"),
        (("*=0",), "'\\*=0' is no clip norm"),
    ):
        with refusal(f"privacy.layer_norms: {words}"):
            sums(rules, 1.0)


@pytest.mark.parametrize(
    "keys, data, message",
    [
        (
            {},
            {},
            'privacy.unit: "document" with packed windows, whose documents see each other; expected data.isolate = true',
        ),
        ({"unit": "window", "max_records_per_unit": 2}, PADDED, "privacy.max_records_per_unit: a window is one record"),
        ({"unit": "user"}, {**PADDED, "user": ""}, "data.user: is empty with"),
        ({}, {**PADDED, "user": "by"}, 'data.user: is "by" with data.source = "jsonl" and privacy.unit = \'document\''),
        ({"unit": "user"}, {**PADDED, "source": "text"}, 'data.user: is "by" with data.source = "text"'),
        (
            {"max_physical_batch": "auto"},
            {**PADDED, "micro_batch": 4},
            "privacy.max_physical_batch: is 'auto' beside",
        ),
        ({"layer_norms": ("*=1",)}, PADDED, "privacy.layer_norms: are for each layer"),
        ({"clip_function": "per_layer", "layer_norms": ("*=none",)}, PADDED, "privacy.layer_norms"),
        ({"max_physical_batch": "lots"}, PADDED, "privacy.max_physical_batch: expected bytes"),
    ],
)
def test_options_that_do_not_fit_are_named(
    keys: dict[str, Any], data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with refusal(f"^{message}"):
        private(tmp_path / "run", data, **keys)


def test_a_document_that_is_larger_than_a_backward_is_refused(tmp_path: Path) -> None:
    with refusal(r"^data.micro_batch: is 1, and a document has \d+ windows, which have to be in one backward"):
        stepper_of(private(tmp_path / "run", {**PACKED, "micro_batch": 1}))
    with refusal(r"^data.batch: 500 documents of \d+ cannot be drawn"):
        stepper_of(private(tmp_path / "run", {**PACKED, "batch": 500}))


def test_records_without_a_user_are_named(tmp_path: Path) -> None:
    config = private(tmp_path / "run", PADDED, unit="user")
    path = Path(config.data.files[0])
    kept = path.read_text()
    for user, words in (({}, 'has no "by"'), ({"by": None}, '"by" is null'), ({"by": True}, '"by" is true')):
        path.write_text(kept + json.dumps({"text": "more", **user}))
        with refusal(f"^{path}:17: {words}; expected text or an integer that names the user"):
            load_windows(config.data)


def test_a_run_of_users_counts_and_audits_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = private(tmp_path / "run", PACKED, unit="user", max_records_per_unit=3)
    run(config)
    record = json.loads((tmp_path / "run" / "record.json").read_text())["privacy"]
    assert (record["unit"], record["adjacency"]) == ("one user", "add or remove one unit")
    assert record["sample_rate"] == 2 / 4
    (tmp_path / "run.toml").write_text(config.toml())
    assert main(["plan", str(tmp_path / "run.toml"), "--target-epsilon", "3"]) == 0
    printed = capsys.readouterr().out
    assert "unit of privacy: one user" in printed and "for 4 users" in printed
    audited = open_run(config, ONE, None, None)
    assert (audited.privacy.unit, len(audited.windows)) == ("window", 4) and audited.sample_rate == 2 / 4
    with audited.private() as stepper:
        assert stepper.engine.sample_rate == 2 / 4


def test_a_model_that_cannot_tell_tokens_apart_is_refused_by_name(tmp_path: Path) -> None:
    config = private(tmp_path / "run", PACKED)
    _, stepper = stepper_of(replace(config, model=replace(config.model, kind="goose")))
    with pytest.raises(GramianError, match=r"blocks\.0\.\w+(\.\w+)?: ids: tokens of this layer cannot be told apart"):
        stepper.prepare()
    stepper.engine.detach()


@pytest.mark.full
def test_the_doctor_looks_at_rows_as_a_draw_has_them(tmp_path: Path) -> None:
    config = private(tmp_path / "run", {**PACKED, "batch": 6})
    training, _ = load_windows(config.data)
    numbers = resolve_precision(config.precision, ONE.device)
    examined = ExaminedRun(config, numbers, ONE, training, partial(build_model, config, training.vocabulary))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, loss = private_windows(examined)
    assert (rows.ok, loss.ok) == (True, True)
    assert rows.measured.startswith("proven")


def test_an_audit_takes_a_window_of_each_document(tmp_path: Path) -> None:
    config = private(tmp_path / "run", PACKED)
    audited = open_run(config, ONE, None, None)
    documents = set(DocumentWindows(load_windows(config.data)[0]).documents.tolist())
    assert (audited.privacy.unit, len(audited.windows)) == ("window", len(documents))
    assert audited.sample_rate == 2 / len(documents)
