"""Prove that a loss does not mix the samples of a batch, by the row proof with the user's loss.

The row proof checks that each row of a layer's tensors depends on its sample alone. Here the gradients come from the user's
loss instead of random cotangents.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.hub import Hub
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.proof_runs import Refuted, refuse
from gramian.taps.proof.prover import Prover
from gramian.taps.proof.remedies.layer_assumptions import LayerAssumptions
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.units import Units

FEW = 32
"""Below this many samples the proof runs with four random numberings of the samples, which choose whom to replace; one
numbering misses a loss that mixes few pairs in 1 of 3 cases."""
SCALES = (1.0, 2.0**-8, 2.0**-16)
"""Factors of the loss, tried until its gradients are finite: a loss scale may be too large for the first batch."""


def check_independence(
    hub: Hub, root: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, ids: Tensor | None = None
) -> None:
    """Prove by runs with replaced samples that a loss depends on each sample through its own rows alone.

    The rows of samples that stay must not change, nor may one sample's gradient when it runs alone. Where that fails it is
    looked for samples that lie elsewhere than on axis 0 of a layer, as before a forward.

    Cost: 2⌈log₂ B⌉ + 4 forwards and backwards of the loss for B samples, four times as many below 32 samples.

    Args:
        hub: the object that installs the model's taps (hooks on its layers) and runs its proofs.
        root: the model.
        loss_fn: the loss of a batch; with one argument more than the batch has parts it gets the model first.
        batch: tensors with the samples on dim 0, in any structure.
        ids: the unit of each row [B] or token [B, T], which counts as one sample; −1: padding; None: each row is one.

    Raises:
        GramianError: if rows of samples that stay change; if nothing can be shown, because all samples are equal, there are
            fewer than two, or none has a finite gradient. It is raised on all processes of a sharded model or none.
    """
    if not callable(loss_fn):
        raise GramianError(f"loss_fn: expected a function of a batch, got {type(loss_fn).__name__}")
    rows = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)

    def execute(scale: float, given: Any) -> Tensor:
        loss = _call(loss_fn, root, given)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise GramianError(f"loss_fn: expected a loss (one number), got {type(loss).__name__}")
        if not bool(torch.isfinite(loss)):
            raise GramianError("batch: has a sample whose loss is not finite; expected one on which it is")
        return scale * loss

    units = None if ids is None else Units.of(ids, rows, padding=True, field="ids")
    samples, count = SampleArguments.of(batch, rows, units=units), rows if units is None else units.count
    with hub.proof.in_company(partial(execute, 1.0, batch)):
        if count < 2:
            raise GramianError(f"batch: has {count} samples; expected at least two")
        known = hub.layouts
        try:
            _prove(hub, execute, samples, count)
        except GramianError:
            hub.layouts = LayerAssumptions(hub, partial(execute, 1.0), samples, lambda: 0).layouts()
            if hub.layouts == known:
                raise
            _prove(hub, execute, samples, count)
        finally:
            hub.layouts = known


def _prove(hub: Hub, execute: Callable[[float, Any], Tensor], samples: SampleArguments, count: int) -> None:
    """Prove the loss `execute(scale, batch)` under every numbering of its `count` units, which lie as `hub.layouts` has it."""
    for seed in range(numberings(count)):
        for scale in SCALES:
            with undisturbed(hub.root_module, samples.leaves):
                lone = partial(hub.proof.lone, samples)
                if _shows(Prover(hub, partial(execute, scale), samples, seed=seed, lone=lone)):
                    break
        else:
            raise GramianError(
                "loss_fn: gives no sample of the batch a gradient, or one that is not finite; expected a loss and samples "
                "that have one"
            )


def numberings(rows: int) -> int:
    """Number of random numberings of the samples with which a batch of `rows` is proven: 4 below FEW, else 1."""
    return 4 if rows < FEW else 1


def _shows(prover: Prover) -> bool:
    """Run one proof of the loss; False if no sample had a gradient, or one was not finite.

    Raises:
        GramianError: if the proof fails, if all samples are equal, or if the loss does not depend on the model.
    """
    if prover.open:
        raise GramianError("batch: all its samples are equal; expected samples that differ")
    try:
        found = prover.prove(lambda _: [0])
    except Refuted as failure:
        refuse(failure)
    if not found.calls:
        raise GramianError("loss_fn: its backward did not go through the private model; expected a loss of its outputs")
    return found.shows


def _call(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
    """Call the loss on a batch; the model comes first if the function needs one argument more than the batch has parts."""
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
