"""Whether samples of a batch depend on each other: a loss that couples them has no per-sample gradient to clip.

Some samples are replaced, one at a time, by their neighbours; the gradient norm of every other sample must not change.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.errors import GramianError
from gramian.privacy.clipping import Clipping

REPLACED = 8
"""Samples that are replaced at most, spread over the batch."""
UNCHANGED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative change of a norm, by dtype; 2e-2 for half precision."""


def check_independence(
    clipping: Clipping,
    root: nn.Module,
    trained: Mapping[str, nn.Parameter],
    loss_fn: Callable[..., Tensor],
    batch: Any,
    tolerance: float | None = None,
) -> None:
    """Replace samples, and require every other sample's norm unchanged. At most nine passes.

    Args:
        clipping: the rule that governs the model; it is paused meanwhile.
        root: the model.
        trained: parameters that the norm covers.
        loss_fn: the loss of a batch.
        batch: tensors with the samples on dim 0, in any structure.
        tolerance: relative; None: by dtype.

    Raises:
        GramianError: if another sample's norm changes, or if all samples are equal, so that nothing can be told.
    """
    rows = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)
    if rows < 2:
        raise GramianError(f"batch: has {rows} samples; expected at least two")
    narrow = min((p.dtype for p in trained.values()), key=lambda dtype: dtype.itemsize)
    allowed = tolerance or UNCHANGED.get(narrow, 2e-2)
    cuda = list({p.device for p in trained.values() if p.is_cuda})

    def norms(given: Any) -> Tensor:
        clipping.paused = True
        try:
            with torch.random.fork_rng(devices=cuda):
                loss = _call(loss_fn, root, given)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise GramianError(f"loss_fn: expected a loss (one number), got {type(loss).__name__}")
                clipping.last = None
                loss.backward()
        finally:
            clipping.paused = False
        if clipping.last is None:
            raise GramianError(
                "loss_fn: its backward did not go through the private model; expected a loss of its outputs"
            )
        found = clipping.last.norms_B.double().cpu()
        if not bool(found.isfinite().all()):
            raise GramianError("batch: has a sample whose gradient is not finite; expected one on which the loss is")
        return found

    last = REPLACED - 1
    chosen = range(rows) if rows <= REPLACED else sorted({i * (rows - 1) // last for i in range(REPLACED)})
    if not any(_differ(batch, _with_neighbour(batch, sample, rows)) for sample in chosen):
        raise GramianError("batch: replacing a sample by its neighbour changes nothing; expected samples that differ")
    before = norms(batch)
    for sample in chosen:
        after = norms(_with_neighbour(batch, sample, rows))
        rest = [i for i in range(rows) if i != sample]
        change = (after[rest] - before[rest]).abs() / before[rest].clamp(min=1e-30)
        if bool((change > allowed).any()):
            worst = rest[int(change.argmax())]
            raise GramianError(
                f"loss: replacing sample {sample} changed the norm of sample {worst} from {float(before[worst]):.6g} to "
                f"{float(after[worst]):.6g}; expected samples that do not depend on each other (per-sample normalisation)"
            )


def _call(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
    """The loss, with the model in front where the function takes one argument more than the batch has parts."""
    given = list(batch) if isinstance(batch, tuple | list) else [batch]
    try:
        takes = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return loss_fn(*given)
    needed = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    count = len(needed)
    if any(p.kind is p.VAR_POSITIONAL for p in takes):
        return loss_fn(model, *given) if count else loss_fn(*given)
    if count == 1 and isinstance(batch, tuple | list) and len(given) != 1:
        return loss_fn(batch)
    return loss_fn(model, *given) if count == len(given) + 1 else loss_fn(*given)


def _with_neighbour(batch: Any, sample: int, rows: int) -> Any:
    """The batch with one sample replaced by the next."""
    return pytree.tree_map(lambda t: _replaced(t, sample, (sample + 1) % rows, rows), batch)


def _differ(batch: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(batch), pytree.tree_leaves(other), strict=True)
    return any(isinstance(left, Tensor) and not torch.equal(left, right) for left, right in pairs)


def _replaced(t: Any, sample: int, other: int, rows: int) -> Any:
    if not isinstance(t, Tensor) or not t.dim() or t.shape[0] != rows:
        return t
    changed = t.clone()
    changed[sample] = t[other]
    return changed
