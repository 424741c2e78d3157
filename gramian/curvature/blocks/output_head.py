"""Find the layer whose outputs are the logits."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.consistency import has_factors
from gramian.taps.model.run_eagerly import run_eagerly
from gramian.taps.model.user_names import is_compiled, named_modules, unwrap
from gramian.taps.root_forward import SAME_VALUES

logger = logging.getLogger("gramian.curvature")
SIDES = (32, 64, 224, 28)
"""Heights and widths of an image that a model of convolutions is tried with."""


def known_head(root: nn.Module, head: str | None) -> str | None:
    """Name of the output layer: `head`, else that of the model's `get_output_embeddings()`; None: unknown before a forward.

    A GramianError is raised if the model has no module of the name `head`.
    """
    names = {id(module): name for name, module in named_modules(root)}
    if head is not None:
        if head not in names.values():
            raise GramianError(f"head: the model has no module {head!r}; expected the name of its output layer")
        return head
    ask = getattr(root, "get_output_embeddings", None)
    module = ask() if callable(ask) else None
    return names.get(id(module)) if module is not None else None


def compiled_head(model: nn.Module, always: bool = False) -> str | None:
    """Name of the layer that makes the output of a model of which `torch.compile` hides it; None if that cannot be found.

    Its eager forward is run on the meta device, where nothing is computed, with an input that its first layer accepts: the
    result is the layer whose output, up to views and casts, it returns, as a forward of the model in eager mode would show. A
    model that needs several arguments or decides by values has none, nor one that is not compiled, unless `always`.
    """
    if not always and not any(is_compiled(module) for module in model.modules()):
        return None
    root = unwrap(model)
    for tokens in _inputs_of(root):
        try:
            return _returned_layer(root, tokens)
        except Exception:  # of the model's own code, which may not run on such an input
            continue
    return None


def warn_unknown_head(layers: Iterable[str], root: nn.Module) -> None:
    """Log that the output layer was not found, and that the last of `layers` takes whitened steps as hidden ones do."""
    order = {name: place for place, (name, _) in enumerate(named_modules(root))}
    last = max(layers, key=lambda layer: order.get(layer, -1))
    logger.warning(
        "head: the model is compiled and its output layer cannot be seen, so %r takes whitened steps as hidden layers do; "
        "expected optimizer.capture(..., head=<name of the output layer>)",
        last,
    )


def _inputs_of(root: nn.Module) -> Iterator[Tensor]:
    """Inputs on the meta device that the first layer of a model with parameters accepts, one after the other."""
    layers = (module for _, module in named_modules(root) if isinstance(module, nn.Embedding | nn.Linear | _ConvNd))
    first = next(layers, None)
    if isinstance(first, nn.Embedding):
        yield torch.zeros(1, 1, dtype=torch.long, device="meta")
    elif isinstance(first, nn.Linear):
        yield torch.zeros(1, first.in_features, dtype=first.weight.dtype, device="meta")
        yield torch.zeros(1, 1, first.in_features, dtype=first.weight.dtype, device="meta")
    elif first is not None:
        for side in SIDES:
            shape = (1, first.in_channels, *[side] * len(first.kernel_size))
            yield torch.zeros(shape, dtype=first.weight.dtype, device="meta")


def _returned_layer(root: nn.Module, x: Tensor) -> str | None:
    """Name of the layer whose output the eager forward of `root` on `x` returns, up to views and casts; None: no layer's."""
    makers: dict[Any, str] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                makers.setdefault(output.grad_fn, name)

        return hook

    meta = _on_meta(root)
    for name, module in named_modules(meta):
        if module is not meta and any(True for _ in module.parameters(False)):
            module.register_forward_hook(note(name))
    with run_eagerly(), torch.enable_grad(), torch.device("meta"):
        output = meta(x)
    found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    logits = getattr(output, "logits", found[0] if found else None)
    node = logits.grad_fn if isinstance(logits, Tensor) else None
    while node is not None and node not in makers and any(kind in node.name() for kind in SAME_VALUES):
        node = node.next_functions[0][0] if node.next_functions else None
    return makers.get(node)


def _on_meta(root: nn.Module) -> nn.Module:
    """A copy of a model on the meta device: its forward changes nothing of the model, and no weight is copied."""
    memo: dict[int, Any] = {}
    for p in root.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.is_floating_point())
    for buffer in root.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(root, memo)


def same_head(head: str, layer: str | None) -> str:
    """Return `head` if it is `layer`, the one whose output the model's forward returned as it is; else raise a GramianError."""
    if layer != head:
        raise GramianError(
            f"head: what {head!r} returns is not what the model returns, so its outputs have no exact Fisher here; expected "
            'the last layer, or fisher_type="mc" and kfac_true_fisher_head=False'
        )
    return head


def seen_head(layer: str | None, specs: Mapping[str, Spec], exact_head: bool) -> str | None:
    """Return `layer` if it has K-FAC factors, else None, or with `exact_head` raise a GramianError.

    `layer` is the one whose output the model's forward returned; None: no such layer was seen.
    """
    if layer is not None and has_factors(layer, specs):
        return layer
    if exact_head and layer is not None:
        raise GramianError(
            f"head: {layer!r} has no K-FAC factors (frozen, or not a linear layer); expected a trained one"
        )
    if exact_head:
        raise GramianError(
            "head: no trained layer was seen whose output the model returns as it is (a compiled model hides it); "
            "expected head= with the name of its output layer"
        )
    return None
