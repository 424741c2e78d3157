"""Site of `nn.MultiheadAttention`, tapped as one layer: it uses weights of child modules without calling the modules."""

from torch import Tensor, nn

from gramian.taps.sites.batch_layout import FIRST, SECOND, SHARED, Layout
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.site_registry import register_site


class Attention(Generic):
    """`nn.MultiheadAttention` run again sample by sample, where its products with weights are not seen."""

    kind = "attention (generic)"

    def __init__(self) -> None:
        """Compute gradients of the parameters of the child projections too (`whole=True`)."""
        super().__init__(whole=True)

    def input_layouts(
        self, module: nn.Module, names: list[str], inputs: list[Tensor], rows: list[int], batch: int
    ) -> list[list[Layout]]:
        """Batch axis (layout) of each input: a 2-D attention mask is shared by all samples, a 3-D one has B·heads rows.

        Arguments as in `Generic.input_layouts`; returns a single list.
        """
        layouts = super().input_layouts(module, names, inputs, rows, batch)[0]
        for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
            if name in ("attn_mask", "5"):
                layouts[i] = SHARED if x.dim() == 2 else FIRST
            elif self.assumed(module, x) == SECOND:
                layouts[i] = SHARED if x.shape[1] % batch else SECOND
        return [layouts]

    def assumed(self, module: nn.Module, x: Tensor) -> Layout:
        """Batch axis of a query, key or value: that of `batch_first`; 0 of a mask of the keys [B, T]."""
        return SECOND if x.dim() == 3 and not module.batch_first else FIRST

    def output_layout(self, module: nn.Module, index: int, value: Tensor, batch: int) -> Layout:
        """Batch axis of an output: that of `batch_first` of what attention returns (`index` 0), 0 of its weights."""
        return self.assumed(module, value) if index == 0 else super().output_layout(module, index, value, batch)


register_site(nn.MultiheadAttention, InlineProducts(Attention()))
