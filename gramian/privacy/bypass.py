"""Gradients that reach a trained parameter past its tap: an error, on every step, before anything is added to `p.grad`."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramian.errors import GramianError


class Bypass:
    """Watches the parameters, and under FSDP2 the unsharded tensors that stand for them in a forward."""

    def __init__(self, trained: Mapping[str, nn.Parameter], listens: Callable[[], bool] = lambda: True) -> None:
        """Put a hook on every parameter.

        Args:
            trained: the parameters.
            listens: False while a proof runs the model untapped.
        """
        self._names, self._listens = set(trained), listens
        self._watched: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name, p in trained.items():
            self.watch(name, p)

    def watch(self, name: str, tensor: Tensor) -> None:
        """See what reaches this tensor, too."""
        if name in self._names and tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._watched:
            self._watched[id(tensor)] = tensor
            self._handles.append(tensor.register_hook(partial(self._refuse, name)))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()

    def _refuse(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._listens():  # a compiled backward calls hooks of weights that get nothing, too
            return
        raise GramianError(
            f"{name}: got a gradient that did not come through its layer's tap and would not be clipped; expected the weight "
            'to be used through its own module only, or max_physical_batch=1 with clipping="keep"'
        )
