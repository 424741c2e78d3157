"""Inputs and output gradients by token of every matrix of a layer that runs again, sample by sample.

The layer runs once to count its products, then vectorised over samples (`vmap`) with a zero for the output of each, whose
gradient is the output's; where `vmap` fails, as on experts that see some tokens each, in a loop over samples. Cost: two
forwards and a backward of the layer.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.taps.gradients.by_sample import Run, in_a_loop
from gramian.taps.products.parts import owner, part_of
from gramian.taps.products.recorded_products import MatrixTokens, RecordedProducts
from gramian.taps.products.sides import LayerForm, Sides

BOTH_WAYS = "its layer multiplies by it and by its transpose"
NO_PRODUCT = "its layer does not multiply by it"
OTHERWISE = "its layer multiplies by it, and uses it otherwise"
CONTRADICTIONS = (BOTH_WAYS, OTHERWISE)
"""The reasons against a matrix of which some uses are products, so that no one sum has all of its gradients."""


def matrix_sides(
    forms: Mapping[str, LayerForm],
    run: Run,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    dims: list[int | None],
    cotangents: list[Tensor],
) -> tuple[dict[str, Sides | str], list[Tensor]]:
    """({matrix: its sides, or why it is none}, outputs of all samples) of one call of a layer.

    Args:
        forms: {name of a parameter, or of a part of one: its form}.
        run: runs the layer on one sample.
        parameters: {name: tensor}.
        inputs: tensors whose axis 0 has the samples where `dims` is 0; the others are shared.
        dims: 0 or None for each input.
        cotangents: gradients of the outputs, samples first.
    """
    with torch.enable_grad():
        try:
            products, outputs = _vectorised(forms, run, parameters, inputs, dims, cotangents)
        except Exception:  # the layer's own code may fail in any way under vmap; sample by sample it is tried again
            return in_a_loop(_one_by_one, forms, run, parameters, inputs, dims, cotangents)
    calls: dict[str, list[MatrixTokens]] = {}
    for tokens in products:
        calls.setdefault(tokens.key, []).append(tokens)
    return _of_all_parts({key: _joined(calls[key]) if key in calls else NO_PRODUCT for key in forms}), outputs


def _of_all_parts(found: dict[str, Sides | str]) -> dict[str, Sides | str]:
    """A part without a product has no tokens if another part of its parameter has some: an expert that none was routed to."""
    seen = {owner(key): sides for key, sides in found.items() if isinstance(sides, Sides)}
    for key, sides in found.items():
        other = seen.get(owner(key))
        if sides == NO_PRODUCT and other is not None:
            found[key] = replace(
                other, inputs_BT=other.inputs_BT[:, :0], gradients_BTO=other.gradients_BTO[:, :0], counted_BT=None,
                positions_BT=None,
            )  # fmt: skip
    return found


def _vectorised(
    forms: Mapping[str, LayerForm],
    run: Run,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    dims: list[int | None],
    cotangents: list[Tensor],
) -> tuple[list[MatrixTokens], list[Tensor]]:
    """The tokens of every product, and the outputs, by `vmap` over samples."""
    with torch.no_grad(), RecordedProducts(parameters, forms) as first:
        run(parameters, [x if d is None else x[0] for x, d in zip(inputs, dims, strict=True)])
    batch = len(cotangents[0])
    zeros = [product.y.new_zeros(batch, *product.y.shape) for product in first.products]

    def one(inputs: Sequence[Tensor], cotangents: Sequence[Tensor], zeros: Sequence[Tensor]) -> Any:
        def with_zeros(zeros: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            with RecordedProducts(parameters, forms, zeros) as recorded:
                ys = run(parameters, inputs)
            return ys, [product.x for product in recorded.products]

        pull: Any = torch.func.vjp(with_zeros, list(zeros), has_aux=True)
        ys, pullback, xs = pull
        return pullback(list(cotangents))[0], xs, ys

    if not zeros:
        return [], torch.func.vmap(run, in_dims=(None, dims))(parameters, inputs)
    gradients, xs, outputs = torch.func.vmap(one, in_dims=(dims, 0, 0))(inputs, cotangents, zeros)
    found = zip(first.products, xs, gradients, strict=True)
    return [tokens for product, x, g in found for tokens in product.matrices(x.detach(), g.detach())], outputs


def _one_by_one(
    forms: Mapping[str, LayerForm],
    run: Run,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    dims: list[int | None],
    cotangents: list[Tensor],
) -> tuple[dict[str, Sides | str], list[Tensor]]:
    """As `matrix_sides`, in a loop over samples, which may have different numbers of tokens."""
    samples: list[dict[str, Sides | str]] = []
    outputs = []
    for i in range(len(cotangents[0])):
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        own = [x.detach() if d is None else x[i].detach() for x, d in zip(inputs, dims, strict=True)]
        with torch.enable_grad(), RecordedProducts(leaves, forms) as recorded:
            ys = run(leaves, own)
        reached = [(y, g[i]) for y, g in zip(ys, cotangents, strict=True) if y.requires_grad]
        zeros = [product.zero for product in recorded.products]
        gradients: Sequence[Tensor | None] = ()
        if zeros and reached:
            gradients = torch.autograd.grad([y for y, _ in reached], zeros, [g for _, g in reached], allow_unused=True)
        calls: dict[str, list[MatrixTokens]] = {}
        for product, g in zip(recorded.products, gradients, strict=False):
            given = torch.zeros_like(product.zero) if g is None else g
            for tokens in product.matrices(product.x.detach()[None], given[None]):
                calls.setdefault(tokens.key, []).append(tokens)
        samples.append({key: _joined(tokens) for key, tokens in calls.items()})
        outputs.append([y.detach() for y in ys])
    per_sample = cotangents[0].shape[1:-1].numel() if cotangents[0].dim() > 2 else 0  # the layer's own number of tokens
    lengths: dict[str, set[int]] = {}
    for key, sample in itertools.product(forms, samples):
        sides = sample.get(key)
        begun = {per_sample} if per_sample and _matrices(key) != key else set[int]()
        lengths.setdefault(_matrices(key), begun).add(sides.gradients_BTO.shape[1] if isinstance(sides, Sides) else 0)
    routed = {name for name, seen in lengths.items() if len(seen) > 1}
    found = {key: _stacked([sample.get(key) for sample in samples], _matrices(key) in routed) for key in forms}
    return _of_all_parts(found), [torch.stack(column) for column in zip(*outputs, strict=True)]


def _joined(calls: Sequence[MatrixTokens]) -> Sides | str:
    """The tokens of all products with one matrix, one call after the other; calls of one token each are steps in time."""
    if len({tokens.layout for tokens in calls}) > 1:
        return BOTH_WAYS
    first, lengths = calls[0], [tokens.a_BTI.shape[1] for tokens in calls]
    a_BTI, g_BTO = (torch.cat([getattr(t, side) for t in calls], 1) for side in ("a_BTI", "g_BTO"))
    counted_BT = None
    if first.counted_BT is not None:
        counted_BT = torch.cat([t.counted_BT for t in calls if t.counted_BT is not None], 1)
    positions_BT, sequence = None, None
    if len(calls) > 1 and max(lengths) > 1:
        one = [torch.arange(length, device=g_BTO.device) for length in lengths]
        positions_BT, sequence = torch.cat(one).expand(len(g_BTO), -1), max(lengths)
    return Sides(
        a_BTI, g_BTO, counted_BT, positions_BT=positions_BT, sequence=sequence, layout=first.layout, recorded=True
    )


def _matrices(key: str) -> str:
    """The bank that a matrix is one of ("w" for "w[3]"), else its own name: parts like "w[0:8]" see tokens of their own."""
    parameter, rows = part_of(key)
    return parameter if isinstance(rows, int) else key


def _stacked(samples: Sequence[Sides | str | None], routed: bool) -> Sides | str:
    """The tokens of all samples of one matrix.

    `routed`: numbers of tokens differ between samples, between matrices of a bank, or from that of its layer. Such tokens are
    of unknown position: those on which no loss depends (padding) are known by a gradient of zero, and masked.
    """
    refused = next((one for one in samples if isinstance(one, str)), None)
    first = next((one for one in samples if isinstance(one, Sides)), None)
    if refused is not None or first is None:
        return refused or NO_PRODUCT
    lengths = [one.gradients_BTO.shape[1] if isinstance(one, Sides) else 0 for one in samples]
    found: list[Tensor | None] = []
    for name in ("inputs_BT", "gradients_BTO", "counted_BT"):
        like = getattr(first, name)
        if like is None:
            found.append(None)
            continue
        rows = [like[0, :0] if one is None else getattr(one, name)[0] for one in samples]
        found.append(torch.stack([F.pad(r, [0, 0] * (r.dim() - 1) + [0, max(lengths) - len(r)]) for r in rows]))
    inputs, gradients, counted = found
    assert inputs is not None and gradients is not None
    positions, sequence = None, None
    if routed:
        real = (gradients != 0).any(-1)
        counted = real if counted is None else counted & real
        positions = torch.full(gradients.shape[:2], -1, device=gradients.device)
    elif first.positions_BT is not None:
        positions, sequence = first.positions_BT.expand(len(samples), -1), first.sequence
    return Sides(
        inputs, gradients, counted, positions_BT=positions, sequence=sequence, layout=first.layout, recorded=True
    )
