"""The methods of a K-FAC object that save and load its factors."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from gramian.curvature.persist import factor_file, factor_folder
from gramian.curvature.refresh import refresh_schedule
from gramian.curvature.state import CurvatureState
from gramian.taps.model.user_names import unwrap


class SavedFactors:
    """Saving and loading of a `CurvatureState`, as methods of the object that owns it (`KFACNaturalGradient`)."""

    state: CurvatureState

    def state_dict(self) -> dict[str, Any]:
        """Factors, counters and options as a dict of tensors and plain values; sharded rows are gathered (collective)."""
        return factor_file.state_dict(self.state)

    def load_state_dict(self, saved: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Replace factors and counters by saved ones; if they do not fit the model, raise a GramianError and change nothing.

        Args:
            saved: a value of `state_dict`.
            model: the model to check the factors against; None: it is checked when they are used. Processes that share a
                model and shard rows (`"gram"`) must all pass it: each then stores its own rows alone, as after a refresh.
        """
        exchange = None
        if model is not None and self.state.options.kfac_distributed_reduce == "gram":
            exchange = refresh_schedule.model_exchange(self.state, model)
        factor_file.load(self.state, saved, None if model is None else unwrap(model), exchange)

    def save(self, path: str) -> None:
        """Write the value of `state_dict` into one safetensors file."""
        factor_file.save(self.state, path)

    def load(self, path: str, model: nn.Module | None = None) -> None:
        """Replace factors and counters by those of a file that `save` wrote; `model`, if given, is checked against them."""
        self.load_state_dict(factor_file.read(path), model)

    def save_sharded(self, folder: str) -> None:
        """Write factors, counters and options into a new shared folder, each process its own rows of factors. Collective.

        No factor is gathered, and any number of processes can load the folder.
        """
        factor_folder.save(self.state, folder, self.state.exchange or refresh_schedule.default_exchange(self.state))

    def load_sharded(self, folder: str, model: nn.Module | None = None) -> None:
        """Replace factors and counters by those of a folder that `save_sharded` wrote, on any number of processes. Collective.

        `model`, if given, is checked against the factors; the processes that share it shard the rows as in a refresh.
        """
        if model is None:
            factor_folder.load(self.state, folder, None, refresh_schedule.default_exchange(self.state))
        else:
            factor_folder.load(self.state, folder, unwrap(model), refresh_schedule.model_exchange(self.state, model))
