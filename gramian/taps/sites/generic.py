"""Any layer at all: exact per-sample gradients by running it again, one sample at a time, through `torch.func`.

Used for parameters that hang on a parent module, unknown layers and attention blocks. The layer's forward and backward
run once more per step (vectorised over samples where `vmap` can), and the outputs are compared with those of the first
run: a layer that is random, mixes samples or treats the batch axis in its own way cannot pass unnoticed.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gramian.errors import GramianError
from gramian.plan.norms import samples_per_chunk
from gramian.taps.gradients import Dense, PerSampleGradient
from gramian.taps.sites.site import Site

REPRODUCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference between the first run and the run by samples."""


class Generic(Site):
    """A layer that gramian has no formula for."""

    kind = "generic"

    def __init__(self, whole: bool) -> None:
        """Set what is owned.

        Args:
            whole: True to own the parameters of all children too, False for the module's direct ones only.
        """
        self.whole = whole

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """Direct parameters, or all."""
        return tuple(name for name, _ in module.named_parameters(recurse=self.whole))

    def check(self, module: nn.Module) -> str | None:
        """Recurrent layers keep the batch on axis 1 unless told otherwise; sharded children cannot be run again."""
        if isinstance(module, nn.RNNBase) and not module.batch_first:
            return "has the batch on axis 1; expected batch_first=True"
        if any(hasattr(p, "placements") for p in module.parameters()):
            return "cannot be run again sample by sample while it is sharded; expected a registered site (register_site)"
        return None

    def shared(self, name: str, value: Tensor, batch: int) -> bool:
        """True if an input belongs to all samples (masks, rotary tables): it does not have B rows."""
        return value.dim() == 0 or value.shape[0] != batch

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Tensor], Any]:
        """Keep every input and the outputs; `extra` holds what is no tensor."""
        if torch.compiler.is_compiling():
            raise GramianError(f"{type(module).__name__} has no compiled tap; expected a registered site, or eager mode")
        output = forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        names = [*(str(i) for i, a in enumerate(args) for _ in pytree.tree_leaves(a))]
        names += [name for name, value in kwargs.items() for _ in pytree.tree_leaves(value)]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        device = (inputs or outputs)[0].device.type
        extra = {
            "forward": getattr(forward, "plain", forward),
            "leaves": [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            "places": [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)],
            "names": names,
            "spec": spec,
            "autocast": (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
        }
        return output, [*inputs, *(y.detach() for y in outputs)], extra

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """One vector-Jacobian product per sample."""
        names = [n for n, p in module.named_parameters(recurse=self.whole) if p.requires_grad]
        params = {n: p.detach() for n, p in module.named_parameters(recurse=self.whole) if p.requires_grad}
        places = extra["places"]
        inputs, outputs = kept[: len(places)], kept[len(places) :]
        if not batch:
            return {n: Dense(params[n].new_zeros(0, *params[n].shape)) for n in names}
        dims = [None if self.shared(extra["names"][i], x, batch) else 0 for i, x in zip(places, inputs, strict=True)]
        out_dims = [_batch_axis(g, batch) for g in output_gradients]

        def one(params: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
            leaves = list(extra["leaves"])
            for place, dim, value in zip(places, dims, inputs, strict=True):
                leaves[place] = value if dim is None else value[None]
            args, kwargs = pytree.tree_unflatten(leaves, extra["spec"])
            device, dtype, enabled = extra["autocast"]
            with torch.autocast(device, dtype, enabled), _borrowed(module, params):
                output = extra["forward"](*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            kept_outputs = [y for y in tensors if y.is_floating_point()][: len(output_gradients)]
            return [y.squeeze(dim) for y, dim in zip(kept_outputs, out_dims, strict=True)]

        def gradient(inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            ys, pullback = torch.func.vjp(lambda p: one(p, inputs), params)
            return pullback(list(output_gradients))[0], ys

        chunk = samples_per_chunk(sum(p.numel() for p in params.values()))
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap's own fallbacks are exact
            try:
                per_sample, again = torch.func.vmap(gradient, in_dims=(dims, out_dims), chunk_size=chunk)(
                    inputs, output_gradients
                )
            except RuntimeError:  # the layer does something vmap cannot: take the samples one by one
                rows = [
                    gradient(
                        [x if d is None else x[i] for x, d in zip(inputs, dims, strict=True)],
                        [g.select(d, i) for g, d in zip(output_gradients, out_dims, strict=True)],
                    )
                    for i in range(batch)
                ]
                per_sample = {n: torch.stack([row[0][n] for row in rows]) for n in names}
                again = [torch.stack([row[1][k] for row in rows]) for k in range(len(outputs))]
        for y, y_again, dim in zip(outputs, again, out_dims, strict=True):
            _same(y.movedim(dim, 0), y_again)
        return {n: Dense(per_sample[n].detach()) for n in names}


def _batch_axis(t: Tensor, batch: int) -> int:
    for axis in (0, 1):
        if t.dim() > axis and t.shape[axis] == batch:
            return axis
    raise GramianError(f"has an output of shape {list(t.shape)}; expected the batch of {batch} as its first axis")


def _same(y: Tensor, again: Tensor) -> None:
    error = (y - again).norm()
    if not bool(error <= REPRODUCES[y.dtype] * y.norm() + torch.finfo(y.dtype).tiny) and bool(y.isfinite().all()):
        raise GramianError(
            "gives other outputs when its samples are run one by one (dropout, mixing of samples, another batch axis?); "
            "expected a deterministic layer, or a registered site (register_site)"
        )


class _borrowed:  # noqa: N801
    """Let a module run on other tensors in place of some of its parameters, tied ones included."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.places: list[tuple[nn.Module, str, Tensor]] = []
        swap = {id(module.get_parameter(name)): tensor for name, tensor in tensors.items()}
        for owner in module.modules():
            for local, p in owner._parameters.items():
                if p is not None and id(p) in swap:
                    self.places.append((owner, local, swap[id(p)]))

    def __enter__(self) -> None:
        self.old = [owner._parameters[local] for owner, local, _ in self.places]
        for owner, local, tensor in self.places:
            owner._parameters[local] = tensor  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        for (owner, local, _), old in zip(self.places, self.old, strict=True):
            owner._parameters[local] = old
