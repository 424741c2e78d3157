"""Run a layer on single samples, for their gradients: vectorised over samples if `vmap` can, else in a loop."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import samples_per_chunk

Run = Callable[[dict[str, Tensor], Sequence[Tensor]], list[Tensor]]
"""Function of {parameter: tensor} and the inputs of one sample that returns the layer's outputs."""
Result = TypeVar("Result")


def gradients_by_sample(
    run: Run,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    dims: list[int | None],
    cotangents: list[Tensor],
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients {parameter: [B, *shape]} and outputs of every sample: by `vmap`, or in a loop if `vmap` fails on the layer.

    `run(parameters, inputs)` returns one sample's outputs. Samples lie on axis 0 of the results, of the output gradients
    `cotangents`, and of the inputs with 0 in `dims` (None: shared by all). GramianError if the loop fails, too.
    """

    def vectorised(inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        ys, pullback = torch.func.vjp(lambda p: run(p, inputs), parameters)[:2]
        return pullback(list(cotangents))[0], ys

    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap's own fallbacks are exact
        warnings.filterwarnings("ignore", message="Dropout mask should only be used for testing")  # of `dropout_masks`
        try:
            chunk = samples_per_chunk(sum(p.numel() for p in parameters.values()))
            return torch.func.vmap(vectorised, in_dims=(dims, 0), chunk_size=chunk)(inputs, cotangents)
        except Exception:  # the layer's own code may fail in any way under vmap; sample by sample it is tried again
            pass
        return in_a_loop(_one_by_one, run, parameters, inputs, dims, cotangents)


def in_a_loop(loop: Callable[..., Result], *arguments: Any) -> Result:
    """`loop(*arguments)`, in which a layer runs sample by sample; GramianError for whatever its own code raises."""
    try:
        return loop(*arguments)
    except GramianError:
        raise
    except Exception as error:  # of the layer's own code, on one sample or on inputs that are split wrongly
        line = str(error).partition("\n")[0]
        raise GramianError(
            f"cannot be run sample by sample ({line}); expected a registered site (register_site)"
        ) from None


def _one_by_one(
    run: Run,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    dims: list[int | None],
    cotangents: list[Tensor],
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients and outputs of every sample by a loop of single-sample backwards, as `gradients_by_sample`."""
    rows, outputs = [], []
    for i in range(cotangents[0].shape[0]):
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        ys = run(leaves, [x.detach() if d is None else x[i].detach() for x, d in zip(inputs, dims, strict=True)])
        reached = [(y, g[i]) for y, g in zip(ys, cotangents, strict=True) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in reached], list(leaves.values()), [g for _, g in reached], allow_unused=True
        )
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), found, strict=True)])
        outputs.append([y.detach() for y in ys])
    gradients = {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}
    return gradients, [torch.stack(column) for column in zip(*outputs, strict=True)]
