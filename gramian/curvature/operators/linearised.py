"""Products J v and Jᵀ u with the Jacobian of a model's outputs by its parameters.

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
from gramian.curvature.estimate.labelled_batch import LabelledBatch, logits_of
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.curvature.operators.side_effect_free import leaves, substituted, twice_differentiable


class Linearised:
    """The outputs f(θ) of a model on one batch, and products with J = ∂f/∂θ; a context that frees everything at its end.

    J v is computed by a forward in forward-mode differentiation, about three times the FLOPs of a plain one, without storing
    activations. If a layer has no forward mode (an autograd function without `jvp`, a custom kernel), J v is the derivative of
    Jᵀ u by u: two backwards on one forward, whose graph is stored. The same result, consistent with the layer's own backward.
    """

    def __init__(
        self, root: nn.Module, question: LabelledBatch, space: ParameterSpace, forward_mode: bool = True
    ) -> None:
        """Prepare leaf tensors for the parameters of `space`; nothing runs yet.

        `root` must be inside `side_effect_free`; `question` has the arguments of its forward; `forward_mode`: try forward-mode
        differentiation first.
        """
        self.forward_mode = forward_mode
        self._root, self._question, self._space = root, question, space
        self._theta = leaves(root, space)
        self._around = ExitStack()
        self._outputs: Tensor | None = None
        self._backwards: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __enter__(self) -> Self:
        """Replace the model's parameters by the prepared leaf tensors until the context ends."""
        self._around.enter_context(substituted(self._root, self._theta))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the model's parameters and free the graph."""
        self._around.close()
        self._outputs = self._backwards = None

    def push(self, vector_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """(outputs f, J v = (∂f/∂θ) v) for v [n], both [*positions, V]; J v is None if no output depends on the parameters."""
        if self.forward_mode:
            try:
                return self._push_forward(vector_N)
            except NotImplementedError:
                self.forward_mode = False
        return self._push_backward(vector_N)

    def pull(self, cotangents: Tensor, last: bool) -> Tensor:
        """Jᵀ u, [n], for u of the outputs' shape. With `last=True` the graph is freed and no further call is possible.

        A GramianError is raised if the outputs do not depend on the parameters.
        """
        pulled = torch.autograd.grad(
            self._answered(), tuple(self._theta.values()), cotangents, retain_graph=not last, materialize_grads=True
        )
        return torch.cat([t.reshape(-1) for t in pulled])

    def _answer(self) -> Tensor:
        return logits_of(self._root(*self._question.args, **self._question.kwargs))

    def _answered(self) -> Tensor:
        """The outputs f with their autograd graph, computed at the first call and stored."""
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
