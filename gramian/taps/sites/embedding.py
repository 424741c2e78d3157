"""`nn.Embedding`: y = W[x], and `nn.EmbeddingBag`, through the generic exact fallback."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.taps.gradients import Indexed, PerSampleGradient
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site import LayerForm, Sides, Site, SiteRun, by_sample, first_tensor, tokens
from gramian.taps.sites.site_registry import register_site


def check_norm(module: nn.Module) -> str | None:
    """Reason against a norm that the forward enforces by writing into the rows that a batch looks up; None: there is none."""
    limited = getattr(module, "max_norm", None) is not None
    return "max_norm changes the weight in the forward pass; expected max_norm=None" if limited else None


def check_table(module: nn.Module) -> str | None:
    """Reason against options of a table that change the gradient after the fact or couple samples; None: there is none."""
    if getattr(module, "sparse", False):
        return "sparse gradients are not supported; expected sparse=False"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq divides by counts over the whole batch; expected scale_grad_by_freq=False"
    return check_norm(module)


class Embedding(Site):
    """A table of rows. `padding_idx` contributes nothing, as in `nn.Embedding` itself."""

    kind = "embedding"

    def check(self, module: nn.Module) -> str | None:
        """Refuse options that change the gradient after the fact or couple samples."""
        return check_table(module)

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Refuse tables that the forward writes to, also frozen ones."""
        return check_norm(module)

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Rows of the table, by the index that looked them up."""
        assert isinstance(module, nn.Embedding)
        index_BT = _index(saved[0], batch)
        rows_BTD = tokens(output_gradients[0], batch)
        if module.padding_idx is not None:
            rows_BTD = rows_BTD * (index_BT != module.padding_idx)[..., None]
        return {"weight": Indexed(index_BT, rows_BTD, module.num_embeddings)}

    def form(self, module: nn.Module) -> LayerForm:
        """A linear layer whose inputs are one-hot."""
        assert isinstance(module, nn.Embedding)
        return LayerForm("table", module.num_embeddings, module.embedding_dim)

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Indices and output gradients; the padding index does not count as a token."""
        assert isinstance(module, nn.Embedding)
        index_BT = _index(saved[0], batch)
        counted = None if module.padding_idx is None else index_BT != module.padding_idx
        return Sides(index_BT, tokens(output_gradients[0], batch), counted)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Save the indices."""
        index = first_tensor(args, kwargs)
        if index.dim() == 0:
            raise GramianError("saw a 0-dim index; expected indices with the batch as first axis")
        return forward(index), [index], None


def _index(index: Tensor, batch: int) -> Tensor:
    """[k·B, …] as [B, T]."""
    split = by_sample(index, batch)
    return split.reshape(batch, torch.Size(split.shape[1:]).numel())


class EmbeddingBag(Generic):
    """Sums or means of rows of a table, through the generic exact fallback."""

    kind = "embedding bag (generic)"

    def __init__(self) -> None:
        """One table."""
        super().__init__(whole=False)

    def check(self, module: nn.Module) -> str | None:
        """Refuse the options that `Embedding` refuses."""
        return check_table(module) or super().check(module)

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Refuse tables that the forward writes to."""
        return check_norm(module)


register_site(nn.Embedding, Embedding())
register_site(nn.EmbeddingBag, EmbeddingBag())
