"""Site of `nn.RNN`, `nn.LSTM`, `nn.GRU`, whose states have the batch on axis 1 even with batch_first=True."""

from torch import Tensor, nn

from gramian.taps.sites.batch_layout import Layout
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site_registry import register_site


class Recurrent(Generic):
    """Site of `nn.RNN`, `nn.LSTM` and `nn.GRU`; per-sample gradients come from running the layer again sample by sample."""

    kind = "recurrent (generic)"

    def __init__(self) -> None:
        """Compute gradients of the module's direct parameters, which are all it has (`whole=False`)."""
        super().__init__(whole=False)

    def check(self, module: nn.Module) -> str | None:
        """Error text if this recurrent layer cannot be tapped (batch_first=False, FSDP2 units inside); None if it can."""
        if not getattr(module, "batch_first", True):
            return "has the batch on axis 1; expected batch_first=True"
        return super().check(module)

    def input_layouts(self, names: list[str], inputs: list[Tensor], rows: list[int], batch: int) -> list[list[Layout]]:
        """Batch axis of each input: 0 of the sequence, 1 of initial states [layers, B, H]; "grouped" if k rows per sample.

        Arguments as in `Generic.input_layouts`; returns a single list.
        """
        grouped = any(x.shape[0] != batch for name, x in zip(names, inputs, strict=True) if name in ("input", "0"))
        first: Layout = "grouped" if grouped else "first"
        second: Layout = "grouped_second" if grouped else "second"
        return [[first if name in ("input", "0") else second for name in names]]

    def output_layout(self, index: int, value: Tensor, batch: int) -> Layout:
        """Batch axis of an output: 0 of the sequence (`index` 0), 1 of final states; "grouped" if it has k rows per sample."""
        if index == 0:
            return "first" if value.shape[0] == batch else "grouped"
        return "second" if value.shape[1] == batch else "grouped_second"


for _layer in (nn.RNN, nn.LSTM, nn.GRU):
    register_site(_layer, Recurrent())
