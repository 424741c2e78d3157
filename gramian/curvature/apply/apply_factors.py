"""Apply factors to a vector over parameters, block by block: (F + damping)^p v, or F v.

All factorisations are launched before the first result is waited for. A gradient that FSDP2 shards by rows is multiplied
without being gathered where that is possible (`sharded_rows`).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.curvature.apply.sharded_rows import ShardedRows, rows_of
from gramian.curvature.blocks.block import Block
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg.factors.cholesky import settle_all
from gramian.linalg.factors.factor import fetch_bounds
from gramian.linalg.wide import exact_float32
from gramian.parallel.exchange import Exchange
from gramian.parallel.placement import place_like

Vector = Mapping[str, Tensor]
"""A vector over parameters: {parameter name: tensor of its shape}."""


def apply(
    blocks: Mapping[str, Block],
    vector: Vector,
    power: float | None,
    options: Options,
    factorisations: SharedFactorisation,
) -> dict[str, Tensor]:
    """(F + damping)^power v, or F v (`power` None: undamped and unclipped), for `blocks`, each with a parameter in v.

    Parameters of a block that v lacks count as zero. Returns {parameter: tensor} for all parameters of the blocks, like v in
    dtype, device and memory layout. `factorisations` shares the work among processes that have the same factors (collective).
    With the option `strict` a GramianError is raised if a factorisation failed and was replaced by another method.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad(), exact_float32():
        if power is not None:
            dtypes = {name: _wide(block, vector) for name, block in blocks.items()}
            prepare(blocks, dtypes, power, options, factorisations)
        for block in blocks.values():
            found.update(_apply_block(block, vector, power, options, factorisations.exchange))
    if options.strict:
        refuse_fallbacks(blocks.values())
    return found


def prepare(
    blocks: Mapping[str, Block],
    dtypes: Mapping[str, torch.dtype],
    power: float,
    options: Options,
    factorisations: SharedFactorisation,
) -> None:
    """Launch all factorisations that (F + damping)^power needs before the first is waited for; processes share the work."""
    factors = list({id(f): f for block in blocks.values() for f in block.factors.values()}.values())
    # Before any other collective: it checks the calls.
    factorisations.factorise(blocks, dtypes, power, options.kfac_eps)
    if power == -1 and not options.damps_product:
        fetch_bounds(factors)
    if power == -1:
        for name, block in blocks.items():
            assert block.damping is not None
            block.prepare(block.damping, options.kfac_eps, dtypes[name])
        settle_all([system for factor in factors for system in factor.pending()])


def _wide(block: Block, vector: Vector) -> torch.dtype:
    """The dtype in which a block multiplies a vector: float64 if the block's G or the vector is float64, else float32."""
    like = next(vector[name] for name in block.spec.parameters if name in vector)
    return torch.float64 if torch.float64 in (block.G.dtype, like.dtype) else torch.float32


def _apply_block(
    block: Block, vector: Vector, power: float | None, options: Options, exchange: Exchange | None
) -> dict[str, Tensor]:
    places = {name: vector[name] for name in block.spec.parameters if name in vector}
    rows, block.gathered = rows_of(block, places, power, exchange)
    if rows is not None:
        return _apply_rows(rows, _wide(block, vector), power, options)
    given = {name: full_vector(t) for name, t in places.items()}
    like, wide = next(iter(places.values())), _wide(block, vector)
    y = block.spec.matrix({name: t.detach().to(wide) for name, t in given.items()})
    if power is None:
        out = block.matvec(y)
    else:
        assert block.damping is not None
        out = block.power(y, power, block.damping, options.kfac_eps)
    return {name: _as(t, places.get(name, like)) for name, t in block.spec.tensors(out).items()}


def _apply_rows(rows: ShardedRows, dtype: torch.dtype, power: float | None, options: Options) -> dict[str, Tensor]:
    """{parameter: tensor} of (F + damping)^power v, or F v (`power` None), for a v of which this process has some rows."""
    block, y = rows.block, rows.matrix(dtype)
    if power is None:
        return rows.tensors(rows.apply(y, lambda _side, factor, z: factor.matvec(z.to(factor.dtype))))
    damping, jitter = block.damping, options.kfac_eps
    assert damping is not None
    if damping.joint and block.A is not None:
        return rows.tensors(rows.joint(y, power, jitter))
    y = y.to(block.working_dtype(dtype, power))
    return rows.tensors(rows.apply(y, lambda side, factor, z: block.act(side, factor, z, power, damping, jitter)))


def refuse_fallbacks(blocks: Iterable[Block]) -> None:
    """Raise a GramianError if a factorisation of `blocks` failed and was replaced by another method."""
    for block in blocks:
        for side, factor in block.factors.items():
            tried = [attempt for attempt in factor.work.attempts if attempt["result"] != "ok"]
            if factor.work.fallback or tried:
                what = factor.work.fallback or f"{len(tried)} Cholesky attempts failed"
                raise GramianError(f"{block.spec.name}: {side}: {what}; expected none (strict=True)")


def _as(t: Tensor, like: Tensor) -> Tensor:
    """Tensor `t` in the dtype, device, sharding and memory layout (fused optimizers ignore strides) of `like`."""
    if isinstance(like, DTensor):
        return place_like(t.to(like.device, like.dtype).contiguous(), like)
    t = t.to(like)
    alike = t.shape != like.shape or t.stride() == like.stride()
    return t if alike else torch.empty_like(like).copy_(t)


def inner(left: Vector, right: Vector) -> float:
    """Inner product Σ left · right of two {parameter: tensor} over the parameters of `left`, which `right` must have too."""
    total = 0.0
    for name, value in left.items():
        total += float(full_vector((value.double() * right[name].double()).sum()))
    return total


def full_vector(t: Tensor) -> Tensor:
    """The full tensor of a DTensor, any other tensor unchanged. Collective for a DTensor."""
    return t.full_tensor() if isinstance(t, DTensor) else t
