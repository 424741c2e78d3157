"""The part of `PrivacyEngine` that counts: releases, their ε, a limit on it, and the file that survives a crash."""

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.privacy.accounting.adjacency import adjacencies
from gramian.privacy.accounting.release_limit import ReleaseLimit
from gramian.privacy.opacus_names import OpacusNames
from gramian.privacy.options import is_number

if TYPE_CHECKING:
    from gramian.privacy.private_model import PrivateModel


class PrivateAccount(OpacusNames):
    """Base of `PrivacyEngine`: the account of ε, which outlives the model that was made private."""

    _model: "PrivateModel | None"
    _warned_of_delta = False

    def get_epsilon(self, delta: float, releases: int | None = None) -> float:
        """ε at this δ of the first `releases` releases (noised sums, one per optimizer step); None: of all so far.

        Releases of engines that were composed with this one are always counted. A δ of 1/records or more warns: publishing one
        record as it is has that δ.
        """
        self._check_delta(delta)
        return self._ledger.accounting.epsilon(delta, releases)

    def compose(self, other: "PrivateAccount") -> None:
        """From now on, ε counts the releases of another engine too, those that it makes later included.

        For models that were trained on the same data, one after the other or beside each other. ε stays per record. What the
        other engine has spent is in `state_dict` of this one, as it is then; after a load, compose again if it goes on.

        ```python
        second.compose(first)
        second.get_epsilon(delta=1e-5)  # of both models, published together
        ```

        Raises:
            GramianError: if the releases of the other engine are counted already, it is this one, or its unit is another one.
        """
        if not isinstance(other, PrivateAccount):
            raise GramianError(f"compose: expected a gramian.PrivacyEngine, got {type(other).__name__}")
        if len(found := self._adjacencies() | other._adjacencies()) > 1:
            raise GramianError(
                f"compose: epsilon of one engine is for {' and of the other for '.join(sorted(found))}; expected the same"
            )
        self._ledger.accounting.compose(other._ledger.accounting)

    def whitened(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W v for {parameter: tensor} v, W the metric of the last draw, in which C bounds what a sample adds; v without one."""
        metric = None if self._model is None else self._model.metric
        return dict(tensors) if metric is None else metric.whitened(tensors)

    def noise_record(self, releases: int) -> dict[str, Any]:
        """What the noise is, as JSON values: its name and, correlated, bands, groups of records, bytes stored, and errors.

        "prefix error": the root mean square of the noise in the sums of the first 1, …, `releases` releases, divided by
        noise_multiplier · max_grad_norm; "of independent noise": the same for noise="gaussian".

        Raises:
            GramianError: before the first `make_private`.
        """
        if self._model is None:
            raise GramianError("engine: makes no model private; expected make_private before")
        return self._model.noise.record(releases)

    def _adjacencies(self) -> set[str]:
        own = set() if self._model is None else {self._model.units.adjacency}
        return own | adjacencies(self._ledger)

    def limit_epsilon(self, target_epsilon: float, target_delta: float, *, planned: int = 0) -> None:
        """From now on, refuse a step before it begins if ε would then exceed `target_epsilon` at `target_delta`.

        `make_private_with_epsilon` does this with its own arguments. `planned`: a number of releases that are known to fit, so
        that ε need not be computed for them.

        Raises:
            GramianError: for an argument out of range.
        """
        for field, value in (("target_epsilon", target_epsilon), ("target_delta", target_delta)):
            if not is_number(value) or not value > 0:
                raise GramianError(f"{field}: expected a number above 0, got {value!r}")
        self._check_delta(target_delta)
        self._ledger.limit = ReleaseLimit(target_epsilon, target_delta, planned)

    def _check_delta(self, delta: float) -> None:
        records = None if self._model is None else self._model.rate.records
        if records is not None and is_number(delta) and delta * records >= 1 and not self._warned_of_delta:
            self._warned_of_delta = True
            assert self._model is not None
            unit = self._model.units.adjacency.rpartition(" ")[2]
            warnings.warn(
                f"delta: {delta:g} is not below 1/{records}, and publishing one of {records} {unit}s as it is has that delta; "
                "expected a much smaller one",
                stacklevel=3,
            )

    @property
    def released(self) -> int:
        """Number that the next release (noised sum) gets: `steps`, or a lower one in a replay, which repeats numbers."""
        return self._ledger.counter.released

    @property
    def steps(self) -> int:
        """Number of releases (noised sums) begun, those lost in a crash included: ε is computed from it."""
        return self._ledger.counter.spent

    @property
    def not_replayed(self) -> str | None:
        """Reason why the last `load_state_dict(…, replay=True)` did not replay; None: it did, or no replay was asked for."""
        return self._ledger.not_replayed

    def bind_counter(self, path: "str | os.PathLike[str]", *, must_exist: bool = False) -> None:
        """Store the number of releases (noised sums) begun in a file beside the checkpoint, durably before each step.

        Args:
            path: path of the file; the first process writes it.
            must_exist: True in a resumed run, whose file must be there.

        Raises:
            GramianError: if the file is missing although it must exist, is damaged, or cannot be written.
        """
        self._ledger.bind(path, must_exist=must_exist)
