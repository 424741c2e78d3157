"""The row proofs of a private run: which releases they cover, when one is repeated, and how they are recorded.

A row proof checks that each row of a layer's tensors depends on its sample alone; a release is one noised sum.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gramian.taps.proof.prover import Proven

PERIOD = 1000
"""With proof="auto", one step in this many on average, chosen by the secret key, repeats a part of the row proof."""


@dataclass
class ProofLog:
    """Record of the row proofs of one engine: when one is repeated, which failed, and which releases are covered.

    A row proof checks that each row of a layer's tensors depends on its sample alone; a release is one noised sum.
    """

    option: str | int
    """The option `proof` of `make_private`: "auto", "off" or a period in steps."""
    loss: bool = False
    """True once `check_independence` has passed."""
    last: int = 0
    """Number of the last release before which the row proof was repeated; 0: not since the first proof."""
    failed: int | None = None
    """Number of the release (noised sum) before which a repeated row proof failed; None: none did."""
    _asked: int = -1
    _before: int = 0
    """Value of `last` before the latest repetition."""

    def is_due(self, release: int, key: bytes) -> bool:
        """True if the row proof is to be repeated before this release: if its hash under `key` is a multiple of the period.

        The period is the option's number, or PERIOD for "auto". False for the first release, for a second call with the same
        number, and if the option is "off".
        """
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
        """Record that the repeated proof failed before this release: releases since the proof before that are not covered."""
        self.last, self.failed = self._before, release

    def record(self, proven: Sequence[Proven], rows: str | None = None) -> dict[str, Any]:
        """What was proven for every structure of inputs, and which releases are not covered, as JSON values.

        `proven` are the proofs' results; `rows` is the text to report instead where rows need no proof (batches of one sample).
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
                    "samples on another axis": list(p.moved),
                    "inputs left alone": list(p.fixed),
                    "outputs not proven": {str(number): reason for number, reason in p.open_outputs.items()},
                }
                for p in proven
            ],
            "releases not covered": None if self.failed is None else [self.last, self.failed],
        }
