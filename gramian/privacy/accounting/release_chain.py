"""The chain of releases (noised sums): every one's number, noise, sample rate and clip norm, bound together by SHA-256.

h_0 is fixed, h_{n+1} = SHA-256(h_n ‖ entry n), and entry n is the JSON of {"number": n, facts}. Facts that stay the same are
stored once for a run of releases, so that a chain of any length has a few lines, from which every h can be computed again, at
2 µs each. Nothing in it depends on data.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramian.core.errors import GramianError

START = hashlib.sha256(b"gramian releases 1").digest()
"""h_0, the hash of a chain without releases."""


def canonical(value: Any) -> bytes:
    """JSON of plain values with sorted keys and without spaces: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class ReleaseChain:
    """Facts of all releases of a private run, and the hash that binds them.

    Example:
        >>> ReleaseChain().extended(2, {"noise_multiplier": 1.0}).runs
        (({'noise_multiplier': 1.0}, 2),)
    """

    runs: tuple[tuple[Mapping[str, Any], int], ...] = ()
    """(facts, number of releases) of each run of releases with the same facts."""
    head: bytes = START
    """h_n after the last release."""

    @property
    def length(self) -> int:
        """Number of releases in the chain."""
        return sum(count for _, count in self.runs)

    def extended(self, length: int, facts: Mapping[str, Any]) -> "ReleaseChain":
        """The chain with releases of these facts appended up to `length`; itself if it has as many."""
        head, first = self.head, self.length
        if length <= first:
            return self
        for number in range(first, length):
            head = hashlib.sha256(head + canonical({"number": number, **facts})).digest()
        runs = self.runs
        if runs and dict(runs[-1][0]) == dict(facts):
            runs = (*runs[:-1], (runs[-1][0], runs[-1][1] + length - first))
        else:
            runs = (*runs, (dict(facts), length - first))
        return ReleaseChain(runs, head)

    def state_dict(self) -> dict[str, Any]:
        """{"runs": [[facts, releases], …], "head": hash in hex}, in plain values."""
        return {"runs": [[dict(facts), count] for facts, count in self.runs], "head": self.head.hex()}

    @classmethod
    def replayed(cls, state: Any, where: str) -> "ReleaseChain":
        """Compute a chain again from the `runs` of a `state_dict`.

        Raises:
            GramianError: naming `where`, if the state is none, or its hash is not that of its releases.
        """
        runs = state.get("runs") if isinstance(state, Mapping) else None
        chain = cls()
        try:
            if not isinstance(runs, Sequence) or not all(map(_is_run, runs)):
                raise ValueError
            for facts, count in runs:
                chain = chain.extended(chain.length + count, facts)
        except (TypeError, ValueError):  # also of facts that are no plain values
            raise GramianError(
                f"{where}: its chain of releases is damaged; expected (facts, releases) of every run of it"
            ) from None
        if chain.head.hex() != state.get("head"):
            raise GramianError(
                f"{where}: its {chain.length} releases were altered (their chain ends at {chain.head.hex()[:12]}…, and "
                f"{str(state.get('head'))[:12]}… is recorded); expected those that were made"
            )
        return chain


def _is_run(run: Any) -> bool:
    if not isinstance(run, Sequence) or len(run) != 2 or not isinstance(run[0], Mapping):
        return False
    return isinstance(run[1], int) and not isinstance(run[1], bool) and run[1] > 0
