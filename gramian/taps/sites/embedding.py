"""Sites of `nn.Embedding`, y = W[x], and of `nn.EmbeddingBag`, which is run again sample by sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gramian.taps.gradients import Indexed, PerSampleGradient
from gramian.taps.products.sides import LayerForm, Sides
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site import Site, SiteRun, by_sample, first_tensor, tokens
from gramian.taps.sites.site_registry import register_site


def check_norm(module: nn.Module) -> str | None:
    """Error text if `max_norm` of a table is set, with which the forward rescales weight rows that it looks up; else None."""
    limited = getattr(module, "max_norm", None) is not None
    return "max_norm changes the weight in the forward pass; expected max_norm=None" if limited else None


def check_table(module: nn.Module) -> str | None:
    """Error text if sparse gradients, scale_grad_by_freq or max_norm of a table are set; None if none of them is."""
    if getattr(module, "sparse", False):
        return "sparse gradients are not supported; expected sparse=False"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq divides by counts over the whole batch; expected scale_grad_by_freq=False"
    return check_norm(module)


class Embedding(Site):
    """Site of `nn.Embedding`. As in PyTorch, tokens with index `padding_idx` add nothing to the gradient."""

    kind = "embedding"

    def check(self, module: nn.Module) -> str | None:
        """Error text if sparse gradients, scale_grad_by_freq or max_norm of this table are set; None if it can be tapped."""
        return check_table(module)

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Error text if `max_norm` of a table is set, also of a frozen one: the forward writes to its weight. Else None."""
        return check_norm(module)

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """All axes but the features."""
        return output.dim() - 1

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """The table's per-sample gradients as an `Indexed`: indices [B, T] and output gradients [B, T, D] of the lookups."""
        assert isinstance(module, nn.Embedding)
        index_BT = _index(saved[0], batch)
        rows_BTD = tokens(output_gradients[0], batch)
        if module.padding_idx is not None:
            rows_BTD = rows_BTD * (index_BT != module.padding_idx)[..., None]
        return {"weight": Indexed(index_BT, rows_BTD, module.num_embeddings)}

    def form(self, module: nn.Module) -> LayerForm:
        """The table [V, D] as the matrix of a linear layer whose inputs are one-hot vectors of the indices."""
        assert isinstance(module, nn.Embedding)
        return LayerForm("table", module.num_embeddings, module.embedding_dim)

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Indices [B, T], output gradients [B, T, D] and a mask [B, T], False at the padding index (None without one)."""
        assert isinstance(module, nn.Embedding)
        index_BT = _index(saved[0], batch)
        counted = None if module.padding_idx is None else index_BT != module.padding_idx
        return Sides(index_BT, tokens(output_gradients[0], batch), counted)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the lookup and save its indices for the backward."""
        index = first_tensor(args, kwargs)
        return forward(index), [index], None


def _index(index: Tensor, batch: int) -> Tensor:
    """Indices [B·k, …], k rows per sample, as [B, T]."""
    split = by_sample(index, batch)
    return split.reshape(batch, torch.Size(split.shape[1:]).numel())


class EmbeddingBag(Generic):
    """Site of `nn.EmbeddingBag`; per-sample gradients come from running the layer again sample by sample."""

    kind = "embedding bag (generic)"

    def __init__(self) -> None:
        """Compute gradients of the module's direct parameter, its one table (`whole=False`)."""
        super().__init__(whole=False)

    def check(self, module: nn.Module) -> str | None:
        """Error text if sparse gradients, scale_grad_by_freq or max_norm are set, or FSDP2 shards a child; else None."""
        return check_table(module) or super().check(module)

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Error text if `max_norm` of the table is set: the forward then writes to its weight. Else None."""
        return check_norm(module)


register_site(nn.Embedding, Embedding())
register_site(nn.EmbeddingBag, EmbeddingBag())
