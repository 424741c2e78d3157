"""Plan the memory of K-FAC on a model: `KFACNaturalGradient.plan`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.curvature.memory.block_footprint import Outline, SidePolicies, bound, outline
from gramian.curvature.memory.block_form import ANY_TOKENS, BlockForm
from gramian.curvature.memory.curvature_plan import CurvaturePlan, CurvatureRow, plan_row
from gramian.curvature.memory.memory_budget import home_of, keeps_of, store_of
from gramian.curvature.memory.operator_footprint import MADE, UNUSED
from gramian.curvature.memory.plan_totals import PlanTotal, add
from gramian.curvature.memory.token_counts import token_source
from gramian.curvature.options import Options, check_count
from gramian.linalg.factors.eigendecomposition import fits


def plan_curvature(
    model: nn.Module,
    options: Options,
    tokens: int | Mapping[str, int] | None = None,
    *,
    inputs: Any = None,
    head: str | None = None,
    exact_head: bool = False,
    power: float = -1.0,
    algebra: torch.dtype = torch.float64,
    activations: torch.dtype | None = None,
    device: str | torch.device | None = None,
    free: int | None = None,
    world_size: int = 1,
    only: Collection[str] | None = None,
    fit: bool = False,
    operators: str | None = None,
) -> CurvaturePlan:
    """Plan the memory of K-FAC from shapes alone; `KFACNaturalGradient.plan` documents the arguments.

    `model` has no wrapper. `head` None: the last linear layer; `exact_head`: its G is the exact Fisher of the softmax; `only`:
    names of the parameters whose blocks are planned, None: all; `fit`: no tokens are stored for EK-FAC. A GramianError is
    raised if they would be, and neither tokens nor inputs are given.
    """
    if operators not in (None, *MADE):
        raise GramianError(f'operators: expected "inverse", "root" or None, got {operators!r}')
    check_count("world_size", world_size)
    streamed = fit or options.budget is not None
    if options.ekfac and not streamed and tokens is None and inputs is None:
        raise GramianError(
            "tokens: a capture with ekfac=True keeps every one of a refresh; expected how many there are, inputs, or fit=True"
        )
    alone = world_size == 1 or options.kfac_distributed_reduce == "none"
    reduced, eigenvectors = options.weight_sharing == "reduce", power != -1 or options.damps_product
    every = find_blocks(model, options)
    specs = {n: spec for n, spec in every.items() if only is None or any(p in only for p in spec.owners)}
    source = token_source(model, specs, tokens, inputs)
    head = head if head is not None else source.last_linear(model, every)
    runs_on = None if device is None else torch.device(device).type
    keeps = keeps_of(specs, options, head, exact_head, runs_on)
    shares = {} if reduced else source.shared_inputs(specs, keeps)
    several = sum(spec.kind == "kronecker" for spec in specs.values()) > 1
    rows: list[CurvatureRow] = []
    totals: dict[str, PlanTotal] = {}
    left = None if free is None else free // 2
    for name, spec in specs.items():
        home = runs_on or home_of(spec.device)
        form = BlockForm.of(
            spec,
            options,
            exact_head and head in spec.layers,
            shared=name in shares,
            powers=power != -1,
            activation=activations,
            algebra=algebra,
            processes=1 if alone else world_size,
            streamed=streamed,
            operators=UNUSED if operators == "root" and several and head in spec.layers else operators or "",
            on_gpu=home == "cuda",
        )
        own = keeps.get(name, SidePolicies())
        counts = source.of_block(spec, world_size if alone else 1, reduced, form.exact)
        found = outline(form, own, counts or ANY_TOKENS)
        one = bound(form, own) if counts is None else found.footprint
        stores = (store_of(options, home),) * 2
        if left is not None and options.woodbury_store_device == "auto" and home == "cuda":
            after_A, left = left - one.rest_A, left - one.rest
            stores = (home if after_A >= 0 else "cpu"), (home if left >= 0 else "cpu")
        add(totals, one, home, stores, bool(options.ema_decay))
        on_cpu = eigenvectors and free is not None and home == "cuda" and not _decomposes(found, free)
        rows.append(plan_row(spec, form, own, home, stores, counts, shares.get(name, ""), on_cpu))
    reduction = "" if world_size == 1 else options.kfac_distributed_reduce
    return CurvaturePlan(tuple(rows), totals, options.budget, keeps, world_size, reduction)


def _decomposes(found: Outline, free: int) -> bool:
    """True if a GPU with `free` bytes has room for each eigendecomposition of a block."""
    shapes = [shape for shape in (found.A, found.G) if shape is not None and shape.kind != "diagonal"]
    return all(fits(shape.columns, 8, free) for shape in shapes)
