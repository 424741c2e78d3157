"""The signed receipt of a private run: what it released, with which weights it ended, and what its audit found.

It proves that the file is as the holder of the run's key signed it, and not that the run was honest: who trains can sign
anything. It has no hash of data, and labels each finding that is computed on private records without noise.
"""

import hashlib
import importlib.metadata
import json
import math
import platform
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.privacy.accounting.accountant import Accounting, history_of
from gramian.privacy.accounting.release_chain import ReleaseChain, canonical
from gramian.privacy.accounting.signing_key import SigningKey, is_signed
from gramian.train.state.checkpoint import CheckpointStore
from gramian.train.state.flat_state import tensors_of
from gramian.train.state.nested import merge
from gramian.train.state.saved_run import find_checkpoint, is_run, load_run
from gramian.verify.private_audit.exported_model import load_exported

FILE, FORMAT = "receipt.json", 1
LEDGER = "releases.json"
PROVES = (
    "The signature proves that this file is as the holder of the run's key signed it. "
    "It does not prove that the run was honest."
)
LIBRARIES = ("torch", "numpy", "opacus", "dp-accounting", "scipy", "cryptography")


# ---- making ----------------------------------------------------------------------------------------------------------


def make_receipt(folder: Path, audit: Mapping[str, Any]) -> dict[str, Any]:
    """The receipt of the private run in a folder, signed with its key; `audit` is the result of its audit.

    Raises:
        GramianError: if the run is not private, has no checkpoint or ledger, or its ledger was altered.
    """
    config, weights = find_checkpoint(folder, "argument RUN_DIR")
    if config.privacy is None:
        raise GramianError(f"argument RUN_DIR: {folder} holds a run without [privacy]; expected a private one")
    with CheckpointStore(folder / "checkpoints", 1) as store:
        newest = store.newest(config.hash) or weights
    section = merge(newest.facts["privacy"], newest.tensors().__getitem__)
    if "signing" not in section:
        raise GramianError(f"{newest.folder}: has no signing key; expected a checkpoint of this version")
    key, chain = SigningKey.of(section["signing"]), ledger_of(folder)
    _refuse_other_past(chain, ReleaseChain.replayed(section["chain"], str(newest.folder)), folder)
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))["privacy"]
    privacy = config.privacy
    receipt = {
        "format": FORMAT,
        "proves": PROVES,
        "versions": _versions(),
        "config": tomllib.loads(config.toml()),
        "config_hash": config.hash,
        "weights": {"sha256": weights_sha256(load_run(folder).model), "step": weights.step},
        "ledger": {**chain.state_dict(), "releases": chain.length},
        "accountant": privacy.accountant,
        "adjacency": f"{record['adjacency']}, which is {record['unit']}",
        "delta": privacy.delta,
        "epsilon": epsilon_of_chain(chain, privacy.accountant, privacy.delta),
        "epsilon_is": record["epsilon"],
        "epsilon_not_valid_because": record["epsilon_not_valid_because"],
        "insecure_reproducible": privacy.insecure_reproducible,
        "row_proof": record["proof"],
        "audit": audit,
        "public_key": key.public,
    }
    return {**receipt, "signature": key.sign(_signed_part(receipt))}


def ledger_of(folder: Path) -> ReleaseChain:
    """The chain of all releases of a run, from its ledger file, replayed.

    Raises:
        GramianError: if the file is missing, was altered, or counts other releases than its chain has.
    """
    path = folder / LEDGER
    try:
        ledger = json.loads(path.read_text(encoding="utf-8"))
        chain, begun = (ledger["about"] or {}).get("chain"), ledger["begun"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise GramianError(f"{path}: cannot be read ({type(problem).__name__}); expected the ledger of a run") from None
    found = ReleaseChain() if begun == 0 else ReleaseChain.replayed(chain, str(path))
    if found.length != begun:
        raise GramianError(f"{path}: counts {begun} releases, and its chain has {found.length}; expected as many")
    return found


def _refuse_other_past(chain: ReleaseChain, earlier: ReleaseChain, folder: Path) -> None:
    """Raise a `GramianError` unless the releases of a checkpoint are the first ones of the ledger."""
    prefix = ReleaseChain()
    for facts, count in chain.runs:
        prefix = prefix.extended(min(prefix.length + count, earlier.length), facts)
    if prefix.head != earlier.head:
        raise GramianError(
            f"{folder / LEDGER}: its first {earlier.length} releases are not those of the checkpoint; expected the ledger of "
            "this run"
        )


def epsilon_of_chain(chain: ReleaseChain, accountant: str, delta: float) -> float | None:
    """ε of all releases of a chain at δ; None: infinite."""
    account = Accounting(accountant)
    account.load_state_dict({"history": [history_of(facts, count) for facts, count in chain.runs]})
    epsilon = account.epsilon(delta)
    return epsilon if math.isfinite(epsilon) else None


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers of a model: names in order, each with dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, t in sorted(tensors_of(model).items()):
        t = t.detach().cpu().contiguous()
        digest.update(canonical([name, str(t.dtype), list(t.shape)]))
        digest.update(t.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _signed_part(receipt: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: all but the signature."""
    return b"gramian receipt\n" + canonical({name: value for name, value in receipt.items() if name != "signature"})


def _versions() -> dict[str, str]:
    found = {"gramian": VERSION, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---- checking --------------------------------------------------------------------------------------------------------


def read_receipt(path: Path) -> dict[str, Any]:
    """Parse a receipt; a `GramianError` if the file is none."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        why = getattr(problem, "strerror", None) or "not JSON"
        raise GramianError(f"argument --verify: {path} cannot be read ({why}); expected a receipt") from None
    needed = {"signature", "public_key", "ledger", "weights", "accountant", "delta", "epsilon"}
    if not isinstance(receipt, dict) or not needed <= set(receipt) or not isinstance(receipt["weights"], dict):
        raise GramianError(f"argument --verify: {path} is not a receipt; expected receipt.json of a run")
    return receipt


def difference(receipt: Mapping[str, Any], key: str, folder: Path | None) -> str | None:
    """What is wrong with a receipt, in one line; None: nothing.

    Checked are the key, the signature, that ε follows from the releases, and with `folder` (of the run, or of its exported
    model) the weights, and the ledger if it is there.

    Raises:
        GramianError: if `key` is no public key, or the folder holds no model.
    """
    signature = receipt["signature"]
    try:
        message = _signed_part(receipt)
    except (TypeError, ValueError):
        return "it has values that JSON does not have; expected the receipt as it was written"
    if not isinstance(signature, str) or not is_signed(message, signature, key):
        by = "" if receipt["public_key"] == key else f"; it names the key {str(receipt['public_key'])[:64]}"
        return f"its content is not what the holder of the key signed{by}; expected an unaltered receipt of that key"
    try:
        chain = ReleaseChain.replayed(receipt["ledger"], "ledger in the receipt")
        if folder is not None and (folder / LEDGER).exists() and (found := ledger_of(folder)) != chain:
            return (
                f"ledger: {folder / LEDGER} has {found.length} releases with the hash {found.head.hex()[:12]}…; the receipt "
                f"has {chain.length} with {chain.head.hex()[:12]}…"
            )
    except GramianError as problem:
        return str(problem)
    epsilon = epsilon_of_chain(chain, receipt["accountant"], receipt["delta"])
    if not _close(epsilon, receipt["epsilon"]):
        return f"epsilon: {epsilon} follows from its releases; the receipt says {receipt['epsilon']}"
    if folder is not None:
        model = load_run(folder).model if is_run(folder) else load_exported(folder)
        signed, seen = receipt["weights"].get("sha256"), weights_sha256(model)
        if seen != signed:
            return f"weights: those of {folder} have the SHA-256 {seen}; the receipt has {signed}"
    return None


def _close(one: float | None, other: Any) -> bool:
    if one is None or not isinstance(other, int | float):
        return one is None and other is None
    return math.isclose(one, other, rel_tol=1e-3)  # accountants of other versions have other grids


def failures(receipt: Mapping[str, Any]) -> Sequence[str]:
    """Names of the checks that the audit in a receipt has failed, and reasons why its ε is not valid."""
    audit = receipt.get("audit") or {}
    failed = [name for name, finding in audit.get("findings", {}).items() if not finding.get("passed")]
    return [*failed, *receipt.get("epsilon_not_valid_because", [])]
