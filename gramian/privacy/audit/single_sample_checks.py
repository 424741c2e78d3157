"""Checks on a forward with one sample, where no proof is needed that rows belong to their samples.

A first tensor of one row may be something else than a sample, and what the model stores of one sample must not reach the next.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.proof.carried_state import changed, refuse_attribute, refuse_buffers
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.model_outputs import output_tensors
from gramian.taps.proof.proof_runs import Refuted, refuse
from gramian.taps.proof.sample_arguments import WIDE_UNSIGNED
from gramian.taps.sites.site import first_tensor


def refuse_ambiguous_batch(args: Any, kwargs: dict[str, Any], *, known: bool) -> None:
    """Refuse a first tensor of one row (a temperature [1], a prompt [1, D]) beside arguments with more rows.

    The rows of the first tensor are the batch, so all samples would be clipped as one.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        known: True if the loader counts records, or a row proof has passed: a tensor [1, …] of 2 axes or more is one sample.

    Raises:
        GramianError: if another argument has more rows, and the first tensor may be something else than a sample.
    """
    first = first_tensor(args, kwargs)
    if not first.dim() or first.shape[0] != 1 or (known and first.dim() > 1):
        return
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    rows = [
        t.shape[0] for t in tensors if t.shape[0] > 1 and t.shape[0] not in first.shape[1:]
    ]  # a mask [T, T] has none
    if rows:
        raise GramianError(
            f"model: its first tensor has one row, which makes a batch of 1, and another argument has {max(rows)} rows; "
            "expected the samples as first tensor argument, and a batch axis of 1 in what belongs to no sample"
        )


def carries_no_state(root: nn.Module, args: Any, kwargs: Any) -> bool:
    """Check that a model carries nothing of one sample into its next forward.

    The model runs on the sample, on the sample again, on another one made of it, and on the sample again: four forwards.

    Returns:
        True if the check passed, or cannot be made (a model under FSDP2, or one that fails on the other sample); False if all
        values of the sample are equal, so that nothing was shown.

    Raises:
        GramianError: naming a buffer or an attribute through which a sample reaches the next batch.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    replaced = [_other(leaf) for leaf in leaves]
    if any(isinstance(module, FSDPModule) for module in root.modules()):
        return True  # other processes would have to run along
    if all(other is leaf for other, leaf in zip(replaced, leaves, strict=True)):
        return False
    with undisturbed(root, leaves), torch.no_grad():
        beginning = InitialState(root, leaves)

        def run(values: list[Any], *, forget: bool = True) -> list[Tensor]:
            beginning.restore(forget=forget)
            given, named = pytree.tree_unflatten(pytree.tree_map(_copy, values), spec)
            return output_tensors(root(*given, **named))

        try:
            run(leaves)
            buffers, attributes = beginning.buffers.changed(), beginning.python.values()
            after_itself = run(leaves, forget=False)
            run(replaced)
            names = changed(attributes, beginning.python.values())
            refuse_buffers(buffers, beginning.buffers.changed())
            after_other = run(leaves, forget=False)
            if names and not _equal(after_itself, after_other):
                refuse_attribute(names[0])
        except Refuted as failure:
            refuse(failure)
        except GramianError:
            raise
        except Exception:  # the user's own code may fail in any way on a sample that is not the user's
            return True
    return True


def _other(leaf: Any) -> Any:
    """Another sample: every value is the median of `leaf`; `leaf` itself if that changes nothing or it has no numbers."""
    if (
        not isinstance(leaf, Tensor)
        or not leaf.numel()
        or leaf.dtype in (torch.bool, *WIDE_UNSIGNED)
        or leaf.is_complex()
    ):
        return leaf
    other = leaf.detach().flatten().sort().values[leaf.numel() // 2].expand_as(leaf).clone()
    return leaf if torch.equal(other, leaf) else other


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """True if two lists of outputs are equal up to rounding; NaN is equal to NaN."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, 64 * torch.finfo(a.dtype).eps, 1e-12, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )
