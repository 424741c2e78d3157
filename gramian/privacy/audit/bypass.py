"""Refuse gradients without noise: those that bypass a trained parameter's tap, and those of parameters outside the engine.

A tap is the hook on a layer that reads its inputs and output gradients. Both checks raise an error, on every step, before
anything is added to `p.grad` of a trained parameter.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from gramian.core.errors import GramianError
from gramian.taps.model.user_names import named_parameters
from gramian.taps.passes import accumulates
from gramian.taps.proof.model_outputs import parameters_behind


class BypassDetector:
    """Refuses gradients that reach a parameter (under FSDP2 its gathered tensor) other than through its layer's tap (hook)."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        is_active: Callable[[], bool],
        told: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Hook every parameter in `trained`; nothing is refused while `is_active` returns False (a proof runs without taps).

        `told()` makes a context whose errors the other processes raise too (`SharedRefusals.told`).
        """
        self._names, self._is_active, self._told = set(trained), is_active, told
        self._watched: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name, p in trained.items():
            self.watch(name, p)

    def watch(self, name: str, tensor: Tensor) -> None:
        """Hook a tensor that is used for the trained parameter `name`: a gradient that reaches it raises a `GramianError`."""
        if id(tensor) not in self._watched and name in self._names and tensor.requires_grad and tensor.is_leaf:
            self._watched[id(tensor)] = tensor
            self._handles.append(tensor.register_hook(partial(self._refuse, name)))

    def remove(self) -> None:
        """Remove the hooks from all parameters and tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()

    def _refuse(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._is_active():  # a compiled backward calls hooks without a gradient, too
            return
        with self._told():
            raise GramianError(
                f"{name}: got a gradient that did not come through its layer's tap and would not be clipped; expected the "
                'weight to be used through its own module only, or max_physical_batch=1 with clipping="keep"'
            )


class OutsideParameters:
    """Refuses other parameters that train on the same backward: a head after the private module, a model in front of it.

    The graph behind a plain `loss.backward()` is not visible. Candidates are therefore collected where they can be seen: in the
    graph of the private module's inputs, in the graph of the loss of `engine.backward`, and in every optimizer that takes a
    step while the model is private. A backward that reaches the private model is refused if autograd is about to add to `.grad`
    of a candidate. So a head with an optimizer of its own is refused at the second backward at the latest; a head that is
    updated by hand is not seen.
    """

    def __init__(
        self, root: nn.Module, trained: Mapping[str, nn.Parameter], optimizer: Optimizer, unreleased: Callable[[], bool]
    ) -> None:
        """Watch the steps of all optimizers until `remove`.

        `trained` are the parameters of `root` that the private `optimizer` steps; `unreleased` returns True while their
        `.grad` holds sums without noise.
        """
        self._root, self._optimizer = weakref.ref(root), weakref.ref(optimizer)
        self._trained = {id(p): name for name, p in trained.items()}
        self._unreleased = unreleased
        self._other_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._behind: Any = WeakIdKeyDictionary()
        """Parameters in the graphs of inputs and losses (weak keys)."""
        seen = weakref.WeakMethod(self._before_any_step)  # what the process's hooks refer to would never be freed

        def before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watch = seen()
            if watch is not None:
                watch(optimizer, args, kwargs)

        self._handle = register_optimizer_step_pre_hook(torch.compiler.disable(before_any_step))
        weakref.finalize(self, self._handle.remove)

    def remove(self) -> None:
        """Stop watching the steps of other optimizers."""
        self._handle.remove()

    def look_behind(self, tensors: Any) -> None:
        """Collect the parameters that a backward through these tensors, in any structure, would reach.

        Cost: nothing for tensors that need no gradient, else a walk through the graph behind them.
        """
        for p in parameters_behind(t for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor)):
            self._behind[p] = True

    def refuse(self) -> None:
        """Raise a `GramianError` if a parameter outside the engine gets a gradient in the running private backward."""
        stepped = [
            p for optimizer in self._other_optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        outside = [p for p in (*self._behind.keys(), *stepped) if id(p) not in self._trained and p.requires_grad]
        for p, leaf in zip(outside, _leaves(outside), strict=True):
            if accumulates(leaf):
                raise GramianError(
                    f"{self._name(p)}: gets an ordinary gradient in the backward of the private model, which has no noise; "
                    "expected all that trains in the module and the optimizer of make_private, and the rest frozen or detached"
                )

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer():
            return
        self._other_optimizers.add(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in self._trained and p.grad is not None and self._unreleased():
                raise GramianError(
                    f"{self._trained[id(p)]}: {type(optimizer).__name__} is about to step it while its .grad has no noise yet; "
                    "expected the step of make_private's optimizer before, and one optimizer for each parameter"
                )

    def _name(self, p: Tensor) -> str:
        root = self._root()
        names = {id(q): name for name, q in named_parameters(root)} if root is not None else {}
        return names.get(id(p), f"a parameter of shape {list(p.shape)} outside of the module")


def _leaves(parameters: Sequence[Tensor]) -> list[Node]:
    """The nodes that add to `.grad` of parameters.

    Only the graph of an operation on a parameter shows its node. A compiled backward reports from inside an operator, where no
    graph is built in this thread; then another thread builds it.
    """

    def look() -> list[Node]:
        with torch.enable_grad():
            return [get_gradient_edge(p).node for p in parameters]

    with torch.enable_grad():
        if not parameters or parameters[0].view_as(parameters[0]).grad_fn is not None:
            return look()
    with ThreadPoolExecutor(1) as another:
        return another.submit(look).result()
