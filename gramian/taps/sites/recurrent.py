"""`nn.RNN`, `nn.LSTM`, `nn.GRU`: their states have the batch on axis 1, whatever `batch_first` says."""

from torch import Tensor, nn

from gramian.taps.sites.generic import Generic, Layout
from gramian.taps.sites.site_registry import register_site


class Recurrent(Generic):
    """A recurrent layer, through the generic exact fallback."""

    kind = "recurrent (generic)"

    def __init__(self) -> None:
        """Own the module's direct parameters, which are all it has."""
        super().__init__(whole=False)

    def check(self, module: nn.Module) -> str | None:
        """The batch must be the first axis of the sequence."""
        if not getattr(module, "batch_first", True):
            return "has the batch on axis 1; expected batch_first=True"
        return super().check(module)

    def input_layouts(self, names: list[str], inputs: list[Tensor], rows: list[int], batch: int) -> list[list[Layout]]:
        """The sequence comes first; initial states are [layers, B, H]. Rows of windows: k·B of them, states likewise."""
        grouped = any(x.shape[0] != batch for name, x in zip(names, inputs, strict=True) if name in ("input", "0"))
        first: Layout = "grouped" if grouped else "first"
        second: Layout = "grouped_second" if grouped else "second"
        return [[first if name in ("input", "0") else second for name in names]]

    def output_layout(self, index: int, value: Tensor, batch: int) -> Layout:
        """The sequence comes first; final states are [layers, B, H], or [layers, k·B, H]."""
        if index == 0:
            return "first" if value.shape[0] == batch else "grouped"
        return "second" if value.shape[1] == batch else "grouped_second"


for _layer in (nn.RNN, nn.LSTM, nn.GRU):
    register_site(_layer, Recurrent())
