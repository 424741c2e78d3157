"""A model's outputs as a linear function of its parameters around where they are: J v and Jᵀ u.

Legend: n parameters, V outputs of a position.
"""

from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.estimate.fisher_labels import Question, logits_of
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.curvature.operators.traceless_passes import leaves, substituted, twice_differentiable


class Linearised:
    """f = f(θ) of one batch, with J = ∂f/∂θ; a context, outside of which nothing is kept.

    J v is a forward in forward mode, about three times the FLOPs of a plain one, that keeps no activations. Where a layer knows
    no forward mode (an autograd function without `jvp`, a kernel of one's own) it is the derivative of Jᵀ u by u, two backwards
    on one forward, whose graph is kept: the same numbers, and those of the layer's own backward whatever that is.
    """

    def __init__(self, root: nn.Module, asked: Question, space: ParameterSpace, forward_mode: bool = True) -> None:
        """Run nothing yet.

        Args:
            root: the model, quiet.
            asked: the batch.
            space: the parameters; all others are constants.
            forward_mode: False where it is known that a layer has none.
        """
        self.forward_mode = forward_mode
        self._root, self._asked, self._space = root, asked, space
        self._theta = leaves(root, space)
        self._around = ExitStack()
        self._outputs: Tensor | None = None
        self._backwards: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __enter__(self) -> Self:
        """Let leaves stand where the parameters do."""
        self._around.enter_context(substituted(self._root, self._theta))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the parameters back, and forget."""
        self._around.close()
        self._outputs = self._backwards = None

    def push(self, vector_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """f and J v, both [*positions, V]; None where v reaches no output."""
        if self.forward_mode:
            try:
                return self._push_forward(vector_N)
            except NotImplementedError:
                self.forward_mode = False
        return self._push_backward(vector_N)

    def pull(self, cotangents: Tensor, last: bool) -> Tensor:
        """Jᵀ u, [n], of u like the outputs; the graph goes with the last one."""
        pulled = torch.autograd.grad(
            self._answered(), tuple(self._theta.values()), cotangents, retain_graph=not last, materialize_grads=True
        )
        return torch.cat([t.reshape(-1) for t in pulled])

    def _answer(self) -> Tensor:
        return logits_of(self._root(*self._asked.args, **self._asked.kwargs))

    def _answered(self) -> Tensor:
        """f with its graph, made once."""
        if self._outputs is None:
            with nullcontext() if self.forward_mode else twice_differentiable():
                self._outputs = self._answer()
            if not self._outputs.requires_grad:
                raise GramianError("model: its outputs have no gradient; expected them to depend on the parameters")
        return self._outputs

    def _push_forward(self, vector_N: Tensor) -> tuple[Tensor, Tensor | None]:
        vector = self._space.unflatten(vector_N)
        with torch.no_grad(), forward_ad.dual_level(), twice_differentiable():
            duals = {
                name: forward_ad.make_dual(p.detach(), vector[name])
                for name, p in unique_parameters(self._root)
                if name in vector
            }
            with substituted(self._root, duals):
                found = forward_ad.unpack_dual(self._answer())
            return found.primal, found.tangent

    def _push_backward(self, vector_N: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs = self._answered()
        if self._backwards is None:
            cotangents = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(
                outputs, tuple(self._theta.values()), cotangents, create_graph=True, materialize_grads=True
            )
            self._backwards = cotangents, pulled
        cotangents, pulled = self._backwards
        reached = [
            (g, v)
            for g, v in zip(pulled, self._space.unflatten(vector_N).values(), strict=True)
            if g.requires_grad  # a parameter that reaches no output has a zero without a graph
        ]
        gradients, vectors = zip(*reached, strict=True)
        (tangents,) = torch.autograd.grad(gradients, cotangents, vectors, retain_graph=True)
        return outputs.detach(), tangents
