"""`record.json`: versions, machine, sizes and data of a run, for repeating it.

The file of a private run has no digests of its data, which would show whether a guessed data set is the one; they are in the
checkpoints, which only their owner can read.
"""

import contextlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from gramian.core.durable_files import replace_text
from gramian.core.version import VERSION
from gramian.optim.precondition import KL_CLIP
from gramian.train.build.run_parts import Parts

FORMAT = 1
"""Version of `record.json`."""
RAW = 'privacy.decisions = "raw": rollbacks, the end of the run and the best checkpoint follow losses without noise'


class Record:
    """Writes record.json of one run: versions, machine, sizes and data, and for a private run whether the reported ε is valid.

    It is written when the run begins, again when ε is found invalid or when more is known about whose row is which, and at the
    end of a run with curvature, with the facts of K-FAC's last refresh.
    """

    def __init__(self, folder: Path, parts: Parts) -> None:
        self._path, self._parts = folder / "record.json", parts
        self._before = self._earlier()
        self.not_valid = self._earlier_reasons()
        """Reasons why the reported ε does not hold for this run; empty if none is known."""
        if parts.config.privacy is not None and parts.config.privacy.decisions == "raw":
            self.mark_not_valid(RAW)
        self._written: Any = ()
        before = self._before.get("kfac")
        self._curvature: dict[str, Any] | None = before if isinstance(before, dict) and "steps" in before else None
        """K-FAC's facts; of a resumed run at first those that it left, because it has inverted nothing yet."""

    def mark_not_valid(self, reason: str) -> None:
        """Add a reason why the reported ε does not hold; the next `update` writes it to record.json."""
        if reason not in self.not_valid:
            self.not_valid.append(reason)

    def update(self, curvature: bool = False) -> None:
        """Write record.json if it has changed: on rank 0, or on the process whose row proof has failed.

        A row proof checks that each row of a layer's tensors depends on one sample only. With `curvature`, of all processes
        together, "kfac" has options, counters and, per layer, λ, κ, tokens and clips (`KFACNaturalGradient.record`).
        """
        if curvature:
            self._curvature = self._parts.stepper.curvature_record() or self._curvature
        privacy, proof, failed = self._parts.stepper.privacy_record(), {}, None
        if privacy is not None:
            proof = privacy.pop("proof")
            if (failed := proof["releases not covered"]) is not None:
                self.mark_not_valid(f"releases from {failed[0]} up to {failed[1]}: a repeated row proof failed")
        known = (proof, [*self.not_valid], self._curvature and self._curvature["steps"])
        if known == self._written or not (failed or self._parts.grid.rank == 0):
            return
        record = _facts_of_run(self._parts)
        if privacy is None:
            record["data_digest"] = self._parts.digests
        else:
            record["privacy"] = {
                **privacy,
                "epsilon": "not valid" if self.not_valid else "as accounted",
                "epsilon_not_valid_because": self.not_valid,
                "proof": {**proof, "not_covered_by_epsilon": ["samples", "runs"]},
            }
        if self._curvature is not None:
            options = self._parts.config.kfac
            natural = options is not None and self._parts.config.optimizer.kind != "kfac"
            record["kfac"] = {
                **self._curvature,
                "kl_clip": (options.kl_clip or KL_CLIP) if natural and options else None,
            }
        replace_text(self._path, json.dumps(record, indent=2) + "\n")
        self._written = known

    def _earlier(self) -> dict[str, Any]:
        """The content of record.json before this run was resumed; empty without one of the same config."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            before = json.loads(self._path.read_text(encoding="utf-8"))
            if before["config_hash"] == self._parts.config.hash:
                return dict(before)
        return {}

    def _earlier_reasons(self) -> list[str]:
        """Reasons why ε does not hold that record.json had before this run was resumed."""
        with contextlib.suppress(LookupError, TypeError):
            return [str(reason) for reason in self._before["privacy"]["epsilon_not_valid_because"]]
        return []


def _facts_of_run(parts: Parts) -> dict[str, Any]:
    """Versions, machine, processes and sizes of a run, as JSON values."""
    cuda = parts.grid.device.type == "cuda"
    return {
        "format": FORMAT,
        "gramian": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(parts.grid.device) if cuda else platform.machine(),
        "processes": parts.grid.size,
        "strategy": parts.grid.kind,
        "config_hash": parts.config.hash,
        "precision": parts.numbers.kind,
        "parameters": sum(p.numel() for p in parts.model.parameters()),
        "vocabulary": parts.training.vocabulary,
        "windows": {"training": len(parts.training), "validation": len(parts.validation)},
        "held_out": parts.validation.held_out,
        "left_out_tokens": parts.training.left_out,
        "host_memory": {
            "snapshots": parts.host.snapshots,
            "bytes_of_one": parts.host.copy,
            "bytes": parts.host.process,
        },
    }
