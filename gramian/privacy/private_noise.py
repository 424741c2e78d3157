"""The noise of one private model over its releases: its strategy, the groups that records are drawn from, record and state."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.audit.weights_digest import digest
from gramian.privacy.noise.correlated_noise import CorrelatedNoise, buffer_bytes
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noise_strategy import NoiseStrategy, is_correlated, kind_of
from gramian.privacy.options import PrivacyOptions
from gramian.privacy.sampling.cyclic import Groups


class PrivateNoise:
    """How the noise of a model's releases is made, as `make_private(noise=…, bands=…, releases=…)` says."""

    def __init__(
        self,
        options: PrivacyOptions,
        sample_rate: float,
        trained: Mapping[str, nn.Parameter],
        parallel: ProcessGrid,
        ledger: Ledger,
    ) -> None:
        """Compute the strategy; raises a GramianError if there cannot be as many groups of records as it needs."""
        self._options, self._trained, self._parallel, self._ledger = options, trained, parallel, ledger
        self.strategy: NoiseStrategy | None = None
        """Coefficients of correlated noise; None: the noise is independent in every release."""
        if is_correlated(options.noise):
            assert options.bands is not None
            self.strategy = NoiseStrategy.of(options.noise, options.bands, options.releases)
        self.kind = kind_of(options.noise, options.bands, sample_rate)
        """What the account has of the noise beside σ and the rate."""

    @property
    def marks(self) -> dict[str, Any]:
        """What a replay must have in common with the first run."""
        return {} if self.strategy is None else {"noise": (self._options.noise, self.strategy.coefficients)}

    def groups(self) -> Groups | None:
        """Groups of cyclic sampling; None: every draw is from all records."""
        return Groups(self.groups_key(), self.kind[2]) if self.kind else None

    def groups_key(self) -> bytes:
        """Key of the records' groups in cyclic sampling, the first process's; it stays the same over resumes."""
        device = next(iter(self._trained.values())).device
        return self._parallel.from_first(self._ledger.signing.subkey("groups"), device)

    def record(self, releases: int) -> dict[str, Any]:
        """See `PrivacyEngine.noise_record`."""
        found: dict[str, Any] = {"name": self._options.noise}
        if self.strategy is not None and self.kind:
            found |= {"bands": self.strategy.bands, "groups": self.kind[2], "releases": self._options.releases}
            found |= {
                "bytes": buffer_bytes(self.strategy, self._trained),
                "prefix error": self.strategy.error(releases),
            }
            found |= {"of independent noise": math.sqrt((releases + 1) / 2)}
        return found

    def state(self, noise: NoisePlan | CorrelatedNoise) -> dict[str, Any] | None:
        """State of the correlated noise, sharded as the parameters; None for independent noise."""
        return noise.state_dict(self._trained) if isinstance(noise, CorrelatedNoise) else None

    def resume(self, noise: NoisePlan | CorrelatedNoise) -> None:
        """Go on from the correlated noise of a state that is replayed, if there is one. Collective.

        Raises:
            GramianError: if it does not fit the parameters, or is not on every process; nothing is replayed then.
        """
        state, self._ledger.noise_state = self._ledger.noise_state, None
        if not isinstance(noise, CorrelatedNoise):
            return
        problem = None
        try:
            noise.load_state_dict(state or {}, self._trained)
        except GramianError as found:  # raised when all processes know
            problem = found
            self._ledger.end_replay()
        numbers = {"noise": -1 if problem is not None else digest(noise.numbers())}
        differs = self._parallel.differing(numbers, next(iter(self._trained.values())).device)
        if problem is not None:
            raise problem
        if differs is not None:
            raise GramianError("state: its noise is not on every process; expected load_state_dict on all of them")
