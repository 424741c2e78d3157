"""The chain of releases: SHA-256 by hand, what tampering does to it, and that it survives a kill at any release."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import gramian
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.accounting.release_chain import START, ReleaseChain
from gramian.privacy.accounting.signing_key import SigningKey, is_signed
from tests.kit.refusals import refusal
from tests.privacy.test_ledger import Trial

FACTS = {"noise_multiplier": 1.0, "sample_rate": 0.25}


def test_every_release_is_hashed_onto_the_one_before() -> None:
    head = START
    for number in range(5):
        entry = {"number": number, **FACTS, **({"max_grad_norm": 2.0} if number > 2 else {})}
        line = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        head = hashlib.sha256(head + line).digest()
    chain = ReleaseChain().extended(1, FACTS).extended(3, FACTS).extended(5, {**FACTS, "max_grad_norm": 2.0})
    assert (chain.head, chain.length, len(chain.runs)) == (head, 5, 2)
    assert ReleaseChain.replayed(json.loads(json.dumps(chain.state_dict())), "here") == chain


def tampered() -> list[Any]:
    state = ReleaseChain().extended(3, FACTS).extended(5, {**FACTS, "noise_multiplier": 2.0}).state_dict()
    found = []
    for change in (
        lambda s: s["runs"][0][0].update(noise_multiplier=4.0),
        lambda s: s["runs"][0].__setitem__(1, 2),
        lambda s: s["runs"].pop(),
        lambda s: s["runs"].reverse(),
        lambda s: s["runs"][1].__setitem__(1, -1),
        lambda s: s.update(head=START.hex()),
        lambda s: s.update(runs="none"),
    ):
        found.append(copy.deepcopy(state))
        change(found[-1])
    return [*found, None]


@pytest.mark.parametrize("state", tampered())
def test_a_chain_that_was_altered_is_refused(state: Any) -> None:
    with refusal("ledger: its .* (altered|damaged)"):
        ReleaseChain.replayed(state, "ledger")


def killed_after(folder: Path, releases: int) -> None:
    """Releases with the file bound, and then nothing: what a kill leaves."""
    trial = Trial()
    trial.engine.bind_counter(folder / "releases.json")
    trial.make_private().noises(releases)


def test_the_ledger_of_a_killed_run_goes_on_and_is_refused_if_altered(tmp_path: Path) -> None:
    killed_after(tmp_path, 3)
    first = json.loads((tmp_path / "releases.json").read_text())["about"]["chain"]
    killed_after(tmp_path, 2)
    written = json.loads((tmp_path / "releases.json").read_text())
    chain = ReleaseChain.replayed(written["about"]["chain"], "file")
    assert (chain.length, written["begun"]) == (5, 5)
    facts, count = chain.runs[0]
    assert (count, facts["noise_multiplier"], facts["max_grad_norm"]) == (5, 1.0, 1e-6)
    assert ReleaseChain().extended(3, facts).head.hex() == first["head"]
    written["about"]["chain"]["runs"][0][1] = 4
    (tmp_path / "releases.json").write_text(json.dumps(written))
    with refusal("release counter: its 4 releases were altered"):
        Trial().engine.bind_counter(tmp_path / "releases.json")


def test_a_replay_adds_nothing_and_lost_releases_are_marked(tmp_path: Path) -> None:
    trial = Trial().make_private()
    trial.noises(2)
    saved = trial.engine.state_dict()
    trial.noises(2)
    ledger: Ledger = trial.engine._ledger
    assert ledger.chain.length == 4
    trial.engine.load_state_dict(saved, replay=False)
    trial.noises(1)
    assert ledger.chain.length == 5 and len(ledger.chain.runs) == 1
    old = {name: value for name, value in saved.items() if name != "chain"}  # of a version without a chain
    other = Trial().make_private()
    other.engine.load_state_dict(old)
    other.noises(1)
    runs = other.engine._ledger.chain.runs
    assert [(facts.get("assumed"), count) for facts, count in runs] == [(True, 2), (None, 1)]


def test_the_signing_key_stays_over_resumes_and_the_noise_key_does_not() -> None:
    trial = Trial().make_private()
    trial.noises(1)
    saved, public = trial.engine.state_dict(), trial.engine._ledger.signing.public
    resumed = Trial()
    with pytest.warns(UserWarning, match="steps begun after"):
        resumed.engine.load_state_dict(saved)
        resumed.make_private()
    assert resumed.engine._ledger.signing.public == public
    assert not resumed.engine.state_dict()["secrets"]["key"].equal(saved["secrets"]["key"])
    assert Trial().engine._ledger.signing.public != public


def test_a_signature_holds_for_its_message_and_key_alone() -> None:
    key, other = SigningKey(bytes(range(32))), SigningKey(bytes(32))
    signature = key.sign(b"message")
    assert is_signed(b"message", signature, key.public)
    assert not is_signed(b"messagf", signature, key.public)
    assert not is_signed(b"message", signature, other.public)
    assert not is_signed(b"message", "no hex", key.public)
    assert bytes(range(32)).hex() not in repr(key)
    with refusal("key: .* is not a public key"):
        is_signed(b"message", signature, "12")
    with refusal("signing key: copies and pickles"):
        copy.copy(key)


def test_the_key_of_a_seed_is_that_of_the_seed() -> None:
    engines = [gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=3) for _ in range(2)]
    assert engines[0]._ledger.signing.public == engines[1]._ledger.signing.public
