"""What a private run knows of its row proofs: which releases they cover, when one is repeated, and what the record says."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gramian.taps.proof.prover import Proven

PERIOD = 1000
"""Steps of which one, drawn by the secret key, repeats a run of the proof."""


@dataclass
class ProofLog:
    """Of one engine."""

    option: str | int
    loss: bool = False
    """True once `check_independence` has passed."""
    last: int = 0
    """The release before which rows were shown to be right."""
    failed: int | None = None
    """The release before which a repeated run failed."""
    _asked: int = -1

    def is_due(self, release: int, key: bytes) -> bool:
        """True for the first forward of one release in a period: those whose keyed hash is a multiple of it. No wait.

        Args:
            release: number of the release that the forward is for.
            key: 32 secret bytes.
        """
        if self.option == "off" or release == self._asked:
            return False
        self._asked = release
        period = self.option if isinstance(self.option, int) else PERIOD
        drawn = int.from_bytes(
            hashlib.blake2b(release.to_bytes(8, "little"), key=key, person=b"row proof").digest()[:8]
        )
        due = release > 0 and drawn % period == 0
        if due:
            self.last, self._before = release, self.last
        return due

    _before: int = 0

    def fail(self, release: int) -> None:
        """The run that was due failed: nothing since the run before it is covered."""
        self.last, self.failed = self._before, release

    def record(self, proven: Sequence[Proven], rows: str | None = None) -> dict[str, Any]:
        """JSON-able: what was shown, on what, and which releases it does not cover.

        Args:
            proven: of every structure of inputs.
            rows: says it all, where rows need no proof.
        """
        shown = rows or ("off" if self.option == "off" else "proven" if proven else "not proven yet")
        return {
            "rows": shown,
            "loss": rows or ("proven" if self.loss else "not proven"),
            "structures": [
                {
                    "samples": p.units,
                    "runs": p.runs,
                    "bit for bit": p.exact,
                    "reversed": p.reversal,
                    "alone": p.alone,
                    "shared rows": sorted(p.shared),
                    "inputs left alone": list(p.fixed),
                    "outputs not proven": {str(number): reason for number, reason in p.open_outputs.items()},
                }
                for p in proven
            ],
            "releases not covered": None if self.failed is None else [self.last, self.failed],
        }
