"""The interface of a site: how one kind of layer runs, and which per-sample gradients its parameters get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.gradients import PerSampleGradient

SiteRun = tuple[Any, list[Tensor], Any]
"""The output of a layer, the tensors to save for the backward, and anything else to save (eager mode only)."""


@dataclass(frozen=True)
class LayerForm:
    """A layer's weight as one matrix [out, in] that maps input tokens to output tokens."""

    layout: Literal["out_in", "in_out", "kernel", "table"]
    """Stored as that matrix, transposed, as [out, channels, *kernel], or as the rows [in, out] of a table."""
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Sides:
    """The two sides of one use of a layer that has a form: the weight's gradient is Σ_t g_t a_tᵀ."""

    inputs_BT: Tensor
    """a [B, T, in]; of a table the indices [B, T]."""
    gradients_BTO: Tensor
    """g [B, T, out]."""
    counted_BT: Tensor | None = None
    """False for tokens that the layer itself leaves out; None: all count."""
    outputs: Callable[[Tensor], Tensor] | None = None
    """The layer applied to rows of inputs, wide."""


class Site:
    """A kind of layer. Subclasses implement `gradients`; the defaults fit a layer with one input and one output.

    ```python
    class Scale(gramian.Site):  # y = x ⊙ s, with one parameter s
        def gradients(self, module, saved, output_gradients, batch, extra):
            return {"s": Summed(tokens(output_gradients[0] * saved[0], batch))}

    gramian.register_site(MyScale, Scale())
    ```
    """

    kind: str = "site"
    compiles: bool = True
    """False if the layer must run in eager mode: `torch.compile` then breaks the graph around it, or refuses."""
    whole: bool = False
    """True if the parameters of all children are explained here, so that the children are not tapped."""

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """Local names of the parameters whose entire gradient `gradients` explains."""
        return tuple(name for name, p in module._parameters.items() if p is not None)

    def check(self, module: nn.Module) -> str | None:
        """Why this instance cannot be tapped, and what is expected instead; None if it can."""
        return None

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Why samples cannot be told apart in this instance as it is now; None if they can."""
        return None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the layer and choose what to save for the backward pass.

        Args:
            module: the layer.
            forward: its own forward, to be called with the arguments.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The output, the tensors to save, and anything else to save (eager mode only).
        """
        return forward(*args, **kwargs), [first_tensor(args, kwargs)], None

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Explain the gradient of each owned parameter that requires one.

        Args:
            module: the layer.
            saved: the tensors that `run` saved.
            output_gradients: gradients of the loss with respect to the outputs, `batch` or k·`batch` rows.
            batch: B.
            extra: the third value that `run` returned.

        Returns:
            {local parameter name: per-sample gradient for B samples}.
        """
        raise NotImplementedError

    def form(self, module: nn.Module) -> LayerForm | None:
        """The layer as one matrix, for which K-FAC has factors; None if it is not one matrix."""
        return None

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Inputs and output gradients of a layer that has a form and a trainable weight."""
        raise NotImplementedError


def trains(module: nn.Module, name: str) -> bool:
    """True if the module has this parameter and it requires a gradient."""
    p = module._parameters.get(name)
    return p is not None and p.requires_grad


def observed(leaves: Sequence[Any], withheld: bool) -> list[int]:
    """Places of the outputs whose gradient is observed: those that autograd reaches, or could if weights were not withheld."""
    tensors = [(i, y) for i, y in enumerate(leaves) if isinstance(y, Tensor) and y.is_floating_point()]
    return [i for i, y in tensors if withheld or y.requires_grad]


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor argument, positional or keyword; one without axes (a number) only where there is no other."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    found = found or [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]  # inside tuples and dicts
    for value in found:
        if value.dim():
            return value
    if found:
        return found[0]
    raise GramianError("forward: got no tensor argument; expected one with the batch as first axis, or batch_size=")


def by_sample(t: Tensor, batch: int) -> Tensor:
    """View rows of shape [k·B, …], or one shared row [1, …], as [B, k, …].

    Raises:
        GramianError: if the rows are neither; the caller adds the layer's name.
    """
    rows = t.shape[0] if t.dim() else 0
    if rows == 1 and batch != 1:
        return t.expand(batch, *t.shape[1:]).unsqueeze(1)
    if t.dim() and batch == 0 and rows == 0:
        return t.unsqueeze(1)
    if not t.dim() or not batch or rows % batch:
        raise GramianError(
            f"saw {rows} rows for a batch of {batch}; expected {batch}, 1 (shared by all samples) or a multiple of {batch} "
            "with the rows of a sample next to each other"
        )
    return t.reshape(batch, rows // batch, *t.shape[1:])


def tokens(t: Tensor, batch: int) -> Tensor:
    """View [k·B, …, N] as [B, T, N], features last."""
    split = by_sample(t, batch)
    return split.reshape(batch, torch.Size(split.shape[1:-1]).numel(), t.shape[-1])
