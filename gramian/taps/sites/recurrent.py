"""Site of `nn.RNN`, `nn.LSTM`, `nn.GRU`, whose states have the batch on axis 1 even with batch_first=True."""

from typing import Any

from torch import Tensor, nn

from gramian.taps.sites.batch_layout import FIRST, SECOND, Layout
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site_registry import register_site


class Recurrent(Generic):
    """Site of `nn.RNN`, `nn.LSTM` and `nn.GRU`; per-sample gradients come from running the layer again sample by sample."""

    kind = "recurrent (generic)"

    def __init__(self) -> None:
        """Compute gradients of the module's direct parameters, which are all it has (`whole=False`)."""
        super().__init__(whole=False)

    def input_layouts(
        self, module: nn.Module, names: list[str], inputs: list[Tensor], rows: list[int], batch: int
    ) -> list[list[Layout]]:
        """Batch axis of each input: that of `batch_first` of the sequence, 1 of initial states [layers, B, H].

        Arguments as in `Generic.input_layouts`; returns a single list.
        """
        return [[_of_sequence(module) if name in ("input", "0") else SECOND for name in names]]

    def output_layout(self, module: nn.Module, index: int, value: Tensor, batch: int) -> Layout:
        """Batch axis of an output: that of `batch_first` of the sequence (`index` 0), 1 of final states."""
        return _of_sequence(module) if index == 0 else SECOND


def _of_sequence(module: Any) -> Layout:
    return FIRST if module.batch_first else SECOND


for _layer in (nn.RNN, nn.LSTM, nn.GRU):
    register_site(_layer, Recurrent())
