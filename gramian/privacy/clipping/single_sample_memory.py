"""Batches of one sample need no proof of rows, but what the model remembers of one sample must not reach the next."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model.preserve_state import Beginning
from gramian.taps.proof.carried_state import changed, refuse_attribute, refuse_buffers
from gramian.taps.proof.proof_runs import Refuted, output_tensors
from gramian.taps.proof.row_proof import refuse, undisturbed
from gramian.taps.proof.sample_arguments import WIDE_UNSIGNED


def remembers_nothing(root: nn.Module, args: Any, kwargs: Any) -> bool:
    """Run the model on a sample and on one that is made of it, and on the sample again after each. Four forwards.

    Args:
        root: the model.
        args: its arguments, with one sample.
        kwargs: its keyword arguments.

    Returns:
        False if nothing could be shown: all values of the sample are equal.

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
        beginning = Beginning(root, leaves)

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
        except Exception:  # the user's own code may fail in any way on a sample that is none of the user's
            return True
    return True


def _other(leaf: Any) -> Any:
    """Another sample, of values that this one has: its median in all places; itself if that changes nothing."""
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
    """True if outputs are the same up to rounding; what is no number counts as equal to itself."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, 64 * torch.finfo(a.dtype).eps, 1e-12, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )
