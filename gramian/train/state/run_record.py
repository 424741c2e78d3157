"""`record.json`: what a run is, for whoever wants to repeat it, and to read: a private run has no digest of its data in it."""

import contextlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from gramian.core.version import VERSION
from gramian.kernels.chacha import NORMALS_VERSION
from gramian.train.build.run_parts import Parts
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.state.run_folder import write_whole

RAW = 'privacy.decisions = "raw": rollbacks, the end of the run and the best checkpoint follow losses without noise'


class Record:
    """Of one run: written when it begins, and again when more is known of its privacy."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        """Nothing is written yet.

        Args:
            folder: of the run.
            parts: of the run.
        """
        self._path, self._parts = folder / "record.json", parts
        self.not_valid = self._earlier()
        """Why ε does not hold for what the run releases; empty: nothing is known against it."""
        if parts.config.privacy is not None and parts.config.privacy.decisions == "raw":
            self.mark_not_valid(RAW)
        self._written: Any = ()

    def mark_not_valid(self, reason: str) -> None:
        """Something happened that ε does not account for; the next `update` writes it."""
        if reason not in self.not_valid:
            self.not_valid.append(reason)

    def update(self) -> None:
        """Write the record if it has changed: by the first process, or by the one whose row proof has failed.

        Raises:
            GramianError: if it cannot be written.
        """
        stepper, failed = self._parts.stepper, None
        proof = stepper.engine.proof if isinstance(stepper, PrivateStepper) else None
        if proof is not None and (failed := proof["releases not covered"]) is not None:
            self.mark_not_valid(f"releases from {failed[0]} up to {failed[1]}: a repeated row proof failed")
        known = (proof, [*self.not_valid])
        if known == self._written or not (failed or self._parts.world.rank == 0):
            return
        record = facts_of_run(self._parts)
        if proof is not None:
            record["privacy"] |= {
                "epsilon": "not valid" if self.not_valid else "as accounted",
                "epsilon_not_valid_because": self.not_valid,
                "proof": {**proof, "not_covered_by_epsilon": ["samples", "runs"]},
            }
        write_whole(self._path, json.dumps(record, indent=2) + "\n")
        self._written = known

    def _earlier(self) -> list[str]:
        """Reasons in the record of the same run before it was resumed."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            before = json.loads(self._path.read_text(encoding="utf-8"))
            if before["config_hash"] == self._parts.config.hash:
                return [str(reason) for reason in before["privacy"]["epsilon_not_valid_because"]]
        return []


def facts_of_run(parts: Parts) -> dict[str, Any]:
    """Versions, machine, world and sizes; digests of the data where it is public.

    A digest without a key tells whether a guessed data set is the one that was trained on. Of a private run it is in the
    checkpoints, which only their owner reads.
    """
    cuda = parts.world.device.type == "cuda"
    record: dict[str, Any] = {
        "gramian": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(parts.world.device) if cuda else platform.machine(),
        "processes": parts.world.size,
        "strategy": parts.world.kind,
        "config_hash": parts.config.hash,
        "precision": parts.numbers.kind,
        "parameters": sum(p.numel() for p in parts.model.parameters()),
        "vocabulary": parts.training.vocabulary,
        "windows": {"training": len(parts.training), "validation": len(parts.validation)},
        "host_memory": {
            "snapshots": parts.host.snapshots,
            "bytes_of_one": parts.host.copy,
            "bytes": parts.host.process,
        },
    }
    options = parts.config.privacy
    if options is None or not isinstance(parts.stepper, PrivateStepper):
        record["data_digest"] = parts.digests
    else:
        engine = parts.stepper.engine
        record["privacy"] = {
            "noise_multiplier": engine.noise_multiplier,
            "sample_rate": engine.sample_rate,
            "expected_batch": engine.expected_batch,
            "unit": "one window",
            "noise_generator": NORMALS_VERSION,
            "decisions": options.decisions,
            "insecure_reproducible": options.insecure_reproducible,
        }
    return record
