"""How many tokens each layer of a model sees, and which layers share their input: one forward on the meta device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.user_names import named_modules
from gramian.taps.sites.site import first_tensor


@dataclass
class Trace:
    """What a forward shows."""

    tokens: dict[str, int] = field(default_factory=dict)
    """{layer: tokens over all its calls}."""
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """{layer: places of its inputs}: equal for layers that read the same numbers."""
    samples: int = 0
    """B."""
    last: str | None = None
    """The layer that was called last."""
    _alive: list[Any] = field(default_factory=list)

    def see(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """One call of a layer."""
        x = first_tensor(args, kwargs)
        if isinstance(module, _ConvNd):
            tokens = output.numel() // output.shape[1]
        else:
            tokens = x.numel() if isinstance(module, nn.Embedding) else x.numel() // max(x.shape[-1], 1)
            tokens *= self.samples if x.shape[0] == 1 else 1  # one row for all samples
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        storage = x.untyped_storage()
        place = (storage._cdata, x.storage_offset(), x.shape, x.stride())
        self.inputs[name] = (*self.inputs.get(name, ()), place)
        self.last = name
        self._alive.append(storage)  # so that its address stays its own


def trace(root: nn.Module, layers: Iterable[str], inputs: Any) -> Trace:
    """Run a forward without numbers; nothing is allocated and the model is left as it is.

    Args:
        root: the model, on any device.
        layers: whose calls are watched.
        inputs: the arguments of one forward over a whole refresh, as a tensor, a tuple or a mapping; meta tensors do.

    Raises:
        GramianError: if the model cannot run without numbers.
    """
    args, kwargs = _arguments(pytree.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs))
    found = Trace(samples=first_tensor(args, kwargs).shape[0])
    modules = dict(named_modules(root))
    hooks = []
    for name in layers:

        def hook(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.see(name, module, args, kwargs, output)

        hooks.append(modules[name].register_forward_hook(partial(hook, name), with_kwargs=True))
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    meta = {name: t.detach().to("meta") for name, t in tensors.items()}
    try:
        with torch.no_grad(), torch.device("meta"):
            torch.func.functional_call(root, meta, args, kwargs)
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # shapes or numbers that are not there, arguments, a model's checks
        what = " ".join(str(error).split())[:200]
        raise GramianError(
            f"inputs: the model cannot run on them without numbers ({type(error).__name__}: {what}); "
            "expected the arguments of one forward, or tokens="
        ) from None
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
