"""`gramian audit`: a run's findings and signed receipt, and every way to alter what was signed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gramian.cli import main
from gramian.privacy.accounting.release_chain import ReleaseChain
from gramian.privacy.accounting.signing_key import SigningKey
from gramian.train.config.config import load_config
from gramian.verify.private_audit import audit_checks as audit_module
from gramian.verify.private_audit.audit_finding import AuditFinding
from gramian.verify.private_audit.receipt import _signed_part
from tests.train.runs import UNPROVEN, run, small


def passes(name: str) -> AuditFinding:
    return AuditFinding(name, True, f"{name} as accounted", {"p_value": 0.5}, on_private_data=name == "sensitivity")


def audited(folder: Path, canaries: AuditFinding | None = None, *words: str) -> int:
    """The exit code of an audit of which the checks themselves, which tests/verify runs, find nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "check_sensitivity", lambda run: passes("sensitivity"))
        patch.setattr(audit_module, "check_releases", lambda run, count: [passes("noise")])
        patch.setattr(audit_module, "check_canaries", lambda *mechanism, **noise: canaries or passes("canaries"))
        return main(["audit", str(folder), *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of two steps with correlated noise, which has no more releases than these, and its receipt."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    model, data = {"layers": 1, "width": 16}, {"length": 16, "batch": 4}
    privacy = {**UNPROVEN, "noise": "bandmf", "bands": 2}
    config = small(folder, run={"steps": 2}, model=model, data=data, schedule={"warmup": 1}, privacy=privacy)
    run(config)
    assert audited(folder) == 0
    return folder


@pytest.fixture
def signed(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def receipt_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "receipt.json").read_text())
    return found


def public_key(folder: Path) -> str:
    return str(receipt_of(folder)["public_key"])


def verify(folder: Path, *target: str, key: str = "") -> int:
    return main(["audit", *target, "--verify", str(folder / "receipt.json"), "--key", key or public_key(folder)])


def test_a_receipt_says_what_was_released_and_verifies(signed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = receipt_of(signed)
    facts, count = receipt["ledger"]["runs"][0]
    assert (count, receipt["ledger"]["releases"], facts["noise_multiplier"]) == (2, 2, 1.0)
    assert receipt["audit"]["findings"]["sensitivity"]["label"] == "not covered by ε"
    assert "label" not in receipt["audit"]["findings"]["noise"]
    assert "digest" not in json.dumps(receipt) and receipt["config_hash"] == load_config(signed / "config.toml").hash
    assert receipt["epsilon"] > 0 and receipt["insecure_reproducible"] is True
    assert verify(signed) == 0
    assert "as it was signed" in capsys.readouterr().out
    page = (signed / "report.html").read_text()
    assert "Audit and receipt" in page and receipt["public_key"] in page
    alone = signed.parent / "alone"
    alone.mkdir()
    shutil.copy(signed / "receipt.json", alone)
    assert verify(alone) == 0 and "no weights and no ledger" in capsys.readouterr().out


def test_exported_weights_verify_and_others_do_not(signed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = signed.parent / "model"
    assert main(["export", str(signed), str(exported)]) == 0
    assert verify(signed, str(exported)) == 0
    tensors = load_file(exported / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name].view(torch.int32).view(-1)[0] ^= 1  # the last bit of one number
    save_file(tensors, exported / "model.safetensors")
    assert verify(signed, str(exported)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "weights: those of" in line and "the receipt has" in line


def resigned(folder: Path, receipt: dict[str, Any], key: SigningKey) -> None:
    receipt = {**receipt, "public_key": key.public}
    (folder / "receipt.json").write_text(json.dumps({**receipt, "signature": key.sign(_signed_part(receipt))}))


def alter_epsilon(folder: Path) -> None:
    (folder / "receipt.json").write_text(json.dumps({**receipt_of(folder), "epsilon": 0.1}))


def alter_a_nested_number(folder: Path) -> None:
    receipt = receipt_of(folder)
    receipt["ledger"]["runs"][0][0]["noise_multiplier"] = 8.0
    (folder / "receipt.json").write_text(json.dumps(receipt))


def add_a_field(folder: Path) -> None:
    (folder / "receipt.json").write_text(json.dumps({**receipt_of(folder), "honest": True}))


def alter_ledger(folder: Path) -> None:
    ledger = json.loads((folder / "releases.json").read_text())
    ledger["about"]["chain"]["runs"][0][0]["noise_multiplier"] = 8.0
    (folder / "releases.json").write_text(json.dumps(ledger))


def rewrite_ledger(folder: Path) -> None:
    """Consistently: fewer releases with a chain of their own."""
    ledger = json.loads((folder / "releases.json").read_text())
    facts = ledger["about"]["chain"]["runs"][0][0]
    ledger.update(begun=1, about={**ledger["about"], "chain": ReleaseChain().extended(1, facts).state_dict()})
    (folder / "releases.json").write_text(json.dumps(ledger))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (alter_epsilon, "not what the holder of the key signed"),
        (alter_a_nested_number, "not what the holder of the key signed"),
        (add_a_field, "not what the holder of the key signed"),
        (alter_ledger, "releases were altered"),
        (rewrite_ledger, "has 1 releases .* the receipt has 2"),
    ],
)
def test_what_was_altered_is_refused_in_one_line(
    change: Callable[[Path], None], names: str, signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = public_key(signed)
    change(signed)
    assert verify(signed, key=key) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(names, line), line


def test_a_receipt_of_another_key_or_with_another_epsilon_is_refused(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, forger, receipt = public_key(signed), SigningKey(bytes(32)), receipt_of(signed)
    resigned(signed, receipt, forger)
    assert verify(signed, key=key) == 1 and f"it names the key {forger.public}" in capsys.readouterr().err
    resigned(signed, {**receipt, "epsilon": receipt["epsilon"] / 2}, forger)
    assert verify(signed) == 1 and "follows from its releases" in capsys.readouterr().err


def test_a_failed_check_is_in_the_receipt_and_the_exit_code(signed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = signed.parent / "found.json"
    assert audited(signed, AuditFinding("canaries", False, "NOT as accounted", {}), "--json", str(file)) == 1
    shown = capsys.readouterr()
    assert "1 of 3 checks failed: canaries" in shown.err
    assert "It does not prove that the run was honest" in shown.out and public_key(signed) in shown.out
    assert json.loads(file.read_text()) == receipt_of(signed)["audit"]
    assert verify(signed) == 0 and "it says itself: canaries" in capsys.readouterr().out


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["audit", "run.toml"]) == 2
    assert "audit: is for one process; expected no torchrun" in capsys.readouterr().err


def test_bad_input_is_one_line(signed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (signed.parent / "plain.toml").write_text(small(signed.parent / "plain").toml())
    run, receipt = str(signed), str(signed / "receipt.json")
    cases = {
        "argument TARGET": [],
        "argument --key: is of a receipt": ["--key", "ab"],
        "argument --key: none given": ["--verify", "none.json"],
        "none.json cannot be read": ["--verify", "none.json", "--key", "ab"],
        "no override with RUN_DIR": [run, "run.steps=3"],
        "argument --json": [run, "--json", run],
        "'ab' is not a public key": [run, "--verify", receipt, "--key", "ab"],
        "holds no model": [f"{run}/checkpoints", "--verify", receipt, "--key", public_key(signed)],
        "privacy: the run has no such section": [str(signed.parent / "plain.toml")],
    }
    for names, words in cases.items():
        assert main(["audit", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert names in line


@pytest.mark.full
def test_the_checks_themselves_pass_on_a_run_and_on_its_config(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(signed)]) == 0
    of_run = capsys.readouterr().out
    assert main(["audit", str(signed / "config.toml"), "run.steps=20", "--releases", "12"]) == 0
    of_config = capsys.readouterr().out
    for shown in (of_run, of_config):
        assert [line.split()[1] for line in shown.splitlines() if line.startswith("ok ")] == [
            f"{name}:" for name in ("sensitivity", "noise", "reuse", "participation", "canaries")
        ]
    assert "receipt:" in of_run and "receipt:" not in of_config and "two of 12 releases" in of_config
    assert verify(signed) == 0
