"""`nn.MultiheadAttention`: its fused path reads the children's weights past their modules, so it is tapped as one layer."""

from torch import Tensor, nn

from gramian.taps.sites.generic import Generic, Layout
from gramian.taps.sites.site_registry import register_site


class Attention(Generic):
    """The attention block as one layer, through the generic exact fallback."""

    kind = "attention (generic)"

    def __init__(self) -> None:
        """Own the projections of the children too."""
        super().__init__(whole=True)

    def check(self, module: nn.Module) -> str | None:
        """The batch must be the first axis."""
        if not getattr(module, "batch_first", True):
            return "has the batch on axis 1; expected batch_first=True"
        return super().check(module)

    def input_layouts(self, names: list[str], inputs: list[Tensor], rows: list[int], batch: int) -> list[list[Layout]]:
        """An attention mask of two axes belongs to no sample, whatever its size; of three, it has a row per head."""
        layouts = super().input_layouts(names, inputs, rows, batch)[0]
        for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
            if name in ("attn_mask", "5"):
                layouts[i] = "shared" if x.dim() == 2 else "grouped"
        return [layouts]


register_site(nn.MultiheadAttention, Attention())
