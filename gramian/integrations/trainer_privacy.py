"""The `privacy` argument of `PrivateTrainer`: its fields, checked, and what the training arguments add to them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gramian.core.errors import GramianError
from gramian.privacy.accounting.noise_search import find_noise_multiplier
from gramian.privacy.engine import PrivacyEngine
from gramian.privacy.noise.noise_strategy import check_noise, kind_of
from gramian.privacy.options import is_number
from gramian.privacy.sampling.population import units_of

ENGINE = (
    "clip_function", "noise", "bands", "releases", "clipping", "norm_algorithm", "memory_budget", "proof", "unit_of",
    "max_records_per_unit", "max_draw",
)  # fmt: skip
"""Arguments of `make_private` that are passed on as they are; max_draw also asks for truncated Poisson draws."""


@dataclass(frozen=True)
class TrainerPrivacy:
    """Fields of the `privacy` argument of `PrivateTrainer`, which is a dict of them."""

    target_delta: float
    """δ of the ε in logs and state."""
    target_epsilon: float | None = None
    """ε that the run may spend: the least noise is chosen for its number of steps. Either this or noise_multiplier."""
    noise_multiplier: float | None = None
    """σ, the standard deviation of the noise divided by max_grad_norm."""
    max_grad_norm: float | None = None
    """C, the largest norm of one record's gradient; None: `TrainingArguments.max_grad_norm`."""
    accountant: str = "prv"
    """How ε is computed, as in `PrivacyEngine`."""
    max_physical_batch: int | str | None = None
    """Most records of one backward, or "auto" or bytes as in `make_private`; None: `per_device_train_batch_size`. Larger
    draws take several backwards."""
    tokens_per_record: float = 1.0
    """A record's loss is the sum over its tokens divided by this public constant, which fixes the unit of max_grad_norm."""
    loss_reduction: "str | float | None" = None
    """As in `make_private`; None: found out. Needed with a loss function of your own (`compute_loss_func`): "mean" or "sum"
    over the records of a micro-batch, or the coefficient of one record's loss, if it divides by `num_items_in_batch`."""
    replay: bool = False
    """A resumed run repeats, bit for bit, the steps that followed its checkpoint; then they are the same releases."""
    insecure_reproducible: bool = False
    """The noise follows from `seed`, for tests: there is no privacy."""
    seed: int | None = None
    """Seed of that noise."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `make_private`, by the names in ENGINE."""

    @classmethod
    def of(cls, given: Any) -> "TrainerPrivacy":
        """The checked fields of a dict; raises a `GramianError` that names a field that is unknown, missing or invalid."""
        if not isinstance(given, Mapping):
            raise GramianError(f"privacy: expected a dict of options, got {type(given).__name__}")
        known = [f.name for f in dataclasses.fields(cls) if f.name != "engine"]
        unknown = [name for name in given if name not in (*known, *ENGINE)]
        if unknown:
            raise GramianError(f"privacy: does not know {unknown[0]!r}; expected {', '.join((*known, *ENGINE))}")
        if "target_delta" not in given:
            raise GramianError("privacy: has no target_delta; expected the δ at which ε is reported, such as 1e-5")
        engine = {name: value for name, value in given.items() if name in ENGINE}
        if engine.get("max_draw") is not None:
            engine["poisson_sampling"] = "truncated"
        options = cls(**{name: value for name, value in given.items() if name in known}, engine=engine)
        if (options.target_epsilon is None) == (options.noise_multiplier is None):
            raise GramianError("privacy: expected one of target_epsilon and noise_multiplier")
        most = engine.get("max_draw")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise GramianError(f"privacy: max_draw: expected a number of records or None, got {most!r}")
        if most is not None and options.accountant != "pld":
            raise GramianError(f'privacy: max_draw: has no bound in {options.accountant}; expected accountant="pld"')
        for name in ("target_delta", "target_epsilon", "tokens_per_record", "max_grad_norm"):
            value = getattr(options, name)
            if value is not None and not (is_number(value) and value > 0):
                raise GramianError(f"privacy: {name}: expected a number above 0, got {value!r}")
        noise = options.noise_multiplier
        if noise is not None and not (is_number(noise) and noise >= 0):
            raise GramianError(f"privacy: noise_multiplier: expected a number of at least 0, got {noise!r}")
        return options

    def new_engine(self) -> PrivacyEngine:
        """An engine with this accountant and a new key."""
        return PrivacyEngine(self.accountant, insecure_reproducible=self.insecure_reproducible, seed=self.seed)

    def population(self, loader: Any) -> int:
        """Number of records of a loader's data set, or with unit_of of their units, that draws are from."""
        units = units_of(loader, self.engine.get("unit_of"), self.engine.get("max_records_per_unit"), poisson=True)
        return len(loader.dataset) if units is None else len(units)

    def noise_for(self, steps: int, sample_rate: float, records: int) -> float:
        """The given noise multiplier, or the least with which `steps` steps at this rate spend at most target_epsilon.

        `records`: number of records, or units, that draws are from. With `releases` of correlated noise these are the steps.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        name, bands, releases = (self.engine.get(key) for key in ("noise", "bands", "releases"))
        most = self.engine.get("max_draw")
        rest: tuple[Any, ...] = () if most is None else (records, most)
        if name is not None:
            check_noise(name, bands, releases)
            rest = kind_of(name, bands, sample_rate)
        steps = releases or steps
        return find_noise_multiplier(self.target_epsilon, self.target_delta, sample_rate, steps, self.accountant, rest)
