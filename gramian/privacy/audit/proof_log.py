"""The row proofs of a private run: which releases they cover, when one is repeated, and how they are recorded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gramian.taps.proof.prover import Proven

PERIOD = 1000
"""Steps of which one, drawn by the secret key, repeats a run of the proof."""


@dataclass
class ProofLog:
    """The row proofs of one engine."""

    option: str | int
    """`proof` of `make_private`."""
    loss: bool = False
    """True once `check_independence` has passed."""
    last: int = 0
    """The release before which rows were shown to be right."""
    failed: int | None = None
    """The release before which a repeated run failed."""
    _asked: int = -1
    _before: int = 0
    """`last` before the run that was due last."""

    def is_due(self, release: int, key: bytes) -> bool:
        """True for the first forward of one release in a period: those whose hash by a secret key is a multiple of it."""
        if self.option == "off" or release == self._asked:
            return False
        self._asked = release
        period = self.option if isinstance(self.option, int) else PERIOD
        hashed = hashlib.blake2b(release.to_bytes(8, "little"), key=key, person=b"row proof").digest()
        due = release > 0 and int.from_bytes(hashed[:8]) % period == 0
        if due:
            self.last, self._before = release, self.last
        return due

    def fail(self, release: int) -> None:
        """Note that the run that was due failed: no release since the run before it is covered."""
        self.last, self.failed = self._before, release

    def record(self, proven: Sequence[Proven], rows: str | None = None) -> dict[str, Any]:
        """What was shown of every structure of inputs, and which releases it does not cover, as JSON values.

        `rows` replaces the result where rows need no proof.
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
