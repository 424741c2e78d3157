"""Find the layer whose outputs are the logits."""

from collections.abc import Mapping

from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.consistency import has_factors
from gramian.taps.model.user_names import named_modules


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
