"""The interface of a site: how one kind of layer is run, what it saves, and how per-sample gradients are computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.products.banks import MatrixSides
from gramian.taps.products.sides import LayerForm, Sides
from gramian.taps.sites.batch_layout import CallLayouts, first_axis

INLINE = "products"
"""Kind of the layers whose own code runs with an observer on every product of a weight (`products.InlineProducts`)."""
SiteRun = tuple[Any, list[Tensor], Any]
"""The output of a layer, the tensors to save for the backward, and anything else to save (eager mode only)."""


class Site:
    """How gramian taps one kind of layer: how to run it, what it saves, and the per-sample gradients of its parameters.

    Subclasses implement `gradients`; the defaults fit a layer with one input and one output.

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
    inline: bool = False
    """True if the layer's own code runs with an observer on every product of a weight (`products.InlineProducts`)."""
    whole: bool = False
    """True if this site computes the gradients of all child modules too, so that the children are not tapped."""

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """Names, inside `module`, of the parameters whose gradients the method `gradients` computes."""
        return tuple(name for name, p in module._parameters.items() if p is not None)

    def check(self, module: nn.Module) -> str | None:
        """Error text that says why this module cannot be tapped, and what is expected instead; None if it can."""
        return None

    def check_per_sample(self, module: nn.Module) -> str | None:
        """Error text if this module has no per-sample gradients in its present mode (it mixes samples, say); None if it has."""
        return None

    def own_forward(self, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward to run, from the layer's own one (`plain`); weights that it reads may then be detached ones."""
        return plain

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

    def copied(self, saved: list[Tensor], extra: Any, batch: int) -> tuple[list[Tensor], Any]:
        """What `run` saved of a call without a batch axis, as of a batch of `batch` equal samples."""
        return [t.expand(batch, *t.shape) for t in saved], extra

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """Number of the first axes of an output on any of which the samples may lie, because the layer treats them alike.

        1 by default; all but the features for layers that see one token at a time, whose [T, B, D] is then read as [B, T, D].
        """
        return 1

    def arranged(
        self, saved: list[Tensor], output_gradients: list[Tensor], layouts: CallLayouts, batch: int, extra: Any
    ) -> tuple[list[Tensor], list[Tensor], Any]:
        """What `run` saved and the output gradients of a call whose samples lie elsewhere, with the samples on axis 0.

        `layouts` are those that a row proof has found. Views where samples lie on axis 1 of at most three, else copies.
        """
        saved = [first_axis(t, layouts.output, batch) for t in saved]
        return saved, [first_axis(g, layouts.output, batch) for g in output_gradients], extra

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of each owned parameter that requires one, from saved inputs and output gradients.

        Args:
            module: the layer.
            saved: the tensors that `run` saved.
            output_gradients: gradients of the loss with respect to the outputs, `batch` or k·`batch` rows.
            batch: number B of samples.
            extra: the third value that `run` returned.

        Returns:
            {parameter name inside the layer: gradients of B samples}.
        """
        raise NotImplementedError

    def form(self, module: nn.Module) -> LayerForm | None:
        """Size and storage of the parameter `weight` of `module` as one matrix, for K-FAC factors; None if it is not one."""
        return None

    def forms(self, module: nn.Module) -> dict[str, LayerForm]:
        """{name of a parameter inside the layer, or of a part of one (`taps.products.parts`): its form as a matrix}.

        Every parameter is named once, by itself or by parts that together are all of it. Default: `weight` with its `form`.
        """
        form = self.form(module)
        return {} if form is None else {"weight": form}

    def sides(self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int) -> Sides:
        """Inputs and output gradients by token of one call; only for layers with a `form` and a trainable weight.

        Arguments as in `gradients`.
        """
        raise NotImplementedError

    def matrix_sides(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> Mapping[str, MatrixSides]:
        """{name as in `forms`: inputs and output gradients by token of one call}, of all matrices that train.

        Arguments as in `gradients`. Matrices of one bank may be parts of one `BankSides`. Of an assumed form that the layer
        does not have, a text that says why. Default: `sides` of the parameter `weight`.
        """
        return {"weight": self.sides(module, saved, output_gradients, batch)}


def trains(module: nn.Module, name: str) -> bool:
    """True if the module has this parameter and it requires a gradient."""
    p = module._parameters.get(name)
    return p is not None and p.requires_grad


def observed(leaves: Sequence[Any], withheld: bool) -> list[int]:
    """Indices of the flattened outputs (`leaves`) whose gradient the tap observes: floating-point, and requiring a gradient.

    `withheld`: the layer ran on detached weights, so that all floating-point outputs are observed.
    """
    tensors = [(i, y) for i, y in enumerate(leaves) if isinstance(y, Tensor) and y.is_floating_point()]
    return [i for i, y in tensors if withheld or y.requires_grad]


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor argument with axes, positional or keyword; if no tensor has axes, the first one.

    Tensors inside tuples, lists and dicts count only if no argument is a tensor itself.

    Raises:
        GramianError: if there is no tensor.
    """
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    found = found or [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]  # inside tuples and dicts
    for value in found:
        if value.dim():
            return value
    if found:
        return found[0]
    raise GramianError("forward: got no tensor argument; expected one with the batch as first axis, or batch_size=")


def by_sample(t: Tensor, batch: int) -> Tensor:
    """View [B·k, …], the k rows of a sample next to each other, as [B, k, …]; one shared row [1, …] is expanded to [B, 1, …].

    Raises:
        GramianError: if the number of rows is neither 1 nor a multiple of `batch` (B); the caller adds the layer's name.
    """
    rows = t.shape[0] if t.dim() else 0
    if rows == 1 and batch != 1:
        return t.expand(batch, *t.shape[1:]).unsqueeze(1)
    if t.dim() and batch == 0 and not t.numel():  # wherever the samples would lie
        return t.new_zeros(0, 1, *t.shape[1:])
    if not t.dim() or not batch or rows % batch:
        raise GramianError(
            f"saw {rows} rows for a batch of {batch}; expected {batch}, 1 (shared by all samples) or a multiple of {batch} "
            "with the rows of a sample next to each other"
        )
    return t.reshape(batch, rows // batch, *t.shape[1:])


def tokens(t: Tensor, batch: int) -> Tensor:
    """View [B·k, …, N], k rows per sample and features last, as [B, T, N]: T tokens per sample. Raises as `by_sample`.

    Features alone [N] are no rows either; they have a copy for each sample where a proof shows that none is theirs.
    """
    found = t
    if t.dim() < 2:
        raise GramianError(f"saw an input of shape {list(t.shape)}; expected the batch as first axis, features last")
    if t.dim() != 3 or not t.shape[0] == batch != 0:
        split = by_sample(t, batch)
        found = split.reshape(batch, torch.Size(split.shape[1:-1]).numel(), t.shape[-1])
    return found
