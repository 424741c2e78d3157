"""Site of `nn.MultiheadAttention`, tapped as one layer: it uses weights of child modules without calling the modules."""

from torch import Tensor, nn

from gramian.taps.sites.batch_layout import Layout
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.site_registry import register_site


class Attention(Generic):
    """`nn.MultiheadAttention` run again sample by sample, where its products with weights are not seen."""

    kind = "attention (generic)"

    def __init__(self) -> None:
        """Compute gradients of the parameters of the child projections too (`whole=True`)."""
        super().__init__(whole=True)

    def check(self, module: nn.Module) -> str | None:
        """Error text if this attention layer cannot be tapped (batch_first=False, FSDP2 units inside); None if it can."""
        if not getattr(module, "batch_first", True):
            return "has the batch on axis 1; expected batch_first=True"
        return super().check(module)

    def input_layouts(self, names: list[str], inputs: list[Tensor], rows: list[int], batch: int) -> list[list[Layout]]:
        """Batch axis (layout) of each input: a 2-D attention mask is shared by all samples, a 3-D one has B·heads rows.

        Arguments as in `Generic.input_layouts`; returns a single list.
        """
        layouts = super().input_layouts(names, inputs, rows, batch)[0]
        for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
            if name in ("attn_mask", "5"):
                layouts[i] = "shared" if x.dim() == 2 else "grouped"
        return [layouts]


register_site(nn.MultiheadAttention, InlineProducts(Attention()))
