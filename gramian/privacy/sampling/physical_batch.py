"""Largest number of samples of one backward that fits into memory, planned from forwards of single records.

A backward of n samples needs n·r + s bytes. r, of one sample: what autograd stores in its forward, once more for what clipping
stores in place of freed activations (nothing with clipping="two_pass"; with a memory_budget that is in s), and three times the
outputs, for a loss behind them. s, of every step: the gradients, the sum of a draw's pieces, the optimizer's state that is not
there yet, and buffers of correlated noise. r is the largest of some records spread over the data: longer ones need more.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from gramian.core.byte_amounts import format_bytes, parse_bytes
from gramian.core.errors import GramianError
from gramian.linalg.factors.eigendecomposition import free_bytes
from gramian.parallel.model_grid import grid_of
from gramian.plan.budget import Budget
from gramian.plan.host_memory import available_memory
from gramian.plan.transformer_memory import optimizer_states
from gramian.privacy.noise.noise_strategy import buffers_of
from gramian.privacy.options import PrivacyOptions, innermost
from gramian.privacy.sampling.dataset_fingerprint import preserved_generators
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.user_names import unwrap

FIELD = "max_physical_batch"
LOOKED_AT = 8
"""Number of records whose forward is measured."""
OUTPUT_COPIES = 3
"""Tensors as large as the outputs that a loss and its backward have at once."""


def plan_physical_batch(
    given: str,
    module: nn.Module,
    root: nn.Module,
    optimizer: Optimizer,
    forwards: Iterator[Callable[[], Any]],
    *,
    clipping: str,
    memory_budget: int | None,
    noise_buffers: int,
    records: int,
) -> int:
    """The largest power of two of samples for which n·r + s fits, at most about `records`; the least of all processes.

    `given` is "auto" (90 % of what is free on the GPU, or of this process's share of the host's memory) or bytes, such as
    "24GB". Each of `forwards` runs one record. `clipping` and `memory_budget` are options of `make_private`, `noise_buffers`
    the numbers that correlated noise stores per parameter.

    Raises:
        GramianError: if one sample does not fit, `given` is neither, or the model is sharded or cannot run on one record.
    """
    parallel = grid_of(module, root)
    if parallel.shards:
        raise GramianError(
            f"{FIELD}: {given!r} runs forwards that other processes would have to join; expected a number"
        )
    stated = None if given == "auto" else parse_bytes(FIELD, given)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    elements, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    kind, momentum = "adamw" if "betas" in optimizer.defaults else "sgd", optimizer.defaults.get("momentum", 0)
    states = 0 if optimizer.state else optimizer_states(kind, momentum)
    rest = size * (1 + states + noise_buffers) + max(4 * elements, size) + (memory_budget or 0)
    stored = max(_measured(root, forward) for forward in forwards)
    record = stored[0] * (1 if clipping == "two_pass" or memory_budget is not None else 2) + OUTPUT_COPIES * stored[1]
    usable = _usable(trained[0].device) if stated is None else stated
    fitting = int(-parallel.most(-float(max(0, usable - rest) // max(record, 1))))
    if fitting < 1:
        raise GramianError(
            f"{FIELD}: {given!r} finds no room for one sample: its backward needs {format_bytes(record)}, gradients, sums and "
            f"optimizer {format_bytes(rest)}, and {format_bytes(usable)} can be used; expected more memory or shorter records"
        )
    return 1 << (min(fitting, max(2, records)).bit_length() - 1)


def planned_size(options: PrivacyOptions, module: nn.Module, optimizer: Optimizer, loader: Any) -> int:
    """`plan_physical_batch` for the arguments of `make_private`, whose option `max_physical_batch` is text."""
    root = unwrap(module)
    return plan_physical_batch(
        str(options.max_physical_batch), module, root, innermost(optimizer), single_records(root, loader),
        clipping=options.clipping, memory_budget=options.budget,
        noise_buffers=buffers_of(options.noise, options.bands), records=len(loader.dataset),
    )  # fmt: skip


def single_records(root: nn.Module, loader: Any) -> Iterator[Callable[[], Any]]:
    """Functions that run a model on single records of a loader, spread over its data set.

    A mapping is given by keywords; of a tuple or list as many tensors from the first on as the forward asks for.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise GramianError(f"{FIELD}: the loader has no single records to measure; expected a number")
    device = next(root.parameters()).device
    known = inspect.signature(root.forward).parameters.values()
    asked = sum(p.default is p.empty and p.kind.name.startswith("POS") for p in known)
    for place in np.unique(np.linspace(0, len(dataset) - 1, LOOKED_AT).astype(int)):
        with preserved_generators():
            batch = pytree.tree_map_only(Tensor, lambda t: t.to(device), loader.collate_fn([dataset[int(place)]]))
        if isinstance(batch, Mapping):
            yield partial(root, **batch)
        else:
            yield partial(root, *(batch[: max(1, asked)] if isinstance(batch, list | tuple) else (batch,)))


def _measured(root: nn.Module, forward: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that autograd stores in one forward, parameters and buffers left out, and bytes of its outputs."""
    own = {t.untyped_storage().data_ptr() for t in (*root.parameters(), *root.buffers())}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    try:
        with preserve_state(root, counters=True), torch.compiler.set_stance("force_eager"):
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
                made = forward()
            outputs = sum(t.nbytes for t in pytree.tree_leaves(made) if isinstance(t, Tensor))
    except Exception as problem:
        raise GramianError(
            f"{FIELD}: the model cannot be measured on single records: {type(problem).__name__}: {problem}; expected a number"
        ) from problem
    return sum(seen.values()), outputs


def _usable(device: torch.device) -> int:
    """90 % of the free bytes of a GPU, or of this process's share of the host's."""
    if device.type == "cuda":
        free = free_bytes(device)
    else:
        try:
            free = available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        except (OSError, KeyError, ValueError):
            raise GramianError(
                f'{FIELD}: "auto" cannot read the free memory here; expected bytes, such as "8GB"'
            ) from None
    return Budget.of_memory(free).limit or 0
