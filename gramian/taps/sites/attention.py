"""`nn.MultiheadAttention`: its fused path reads the children's weights past their modules, so it is one layer to us."""

from typing import Any

from torch import Tensor, nn

from gramian.taps.sites.generic import Generic
from gramian.taps.sites.registry import register_site


class Attention(Generic):
    """The whole attention block, through the generic exact fallback."""

    kind = "attention (generic)"

    def __init__(self) -> None:
        """Own the projections of the children too."""
        super().__init__(whole=True)

    def check(self, module: nn.Module) -> str | None:
        """The batch must be the first axis."""
        return None if getattr(module, "batch_first", True) else "has the batch on axis 1; expected batch_first=True"

    def shared(self, name: str, value: Tensor, batch: int) -> bool:
        """A two-dimensional attention mask belongs to no sample, whatever its size."""
        return name in ("attn_mask", "5") and value.dim() == 2 or super().shared(name, value, batch)

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """All parameters of the block."""
        return tuple(name for name, _ in module.named_parameters())

    def __repr__(self) -> str:
        """Name of the kind."""
        return self.kind


_attention: Any = Attention()
register_site(nn.MultiheadAttention, _attention)
