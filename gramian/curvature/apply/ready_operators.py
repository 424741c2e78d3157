"""Ready operators: a power of the damped Fisher as matrices that are computed once a refresh and applied at every step.

For a block F = G ⊗ A with factored damping, (F + damping)^p Y = P_G Y P_A for Y [o, m]. Factors and damping in; out comes per
side a matrix P [n, n], or P = diag(d) + V Uᵀ with thin V and U [n, r] where r is at most ¾ n. Blocks of one shape are stacked
and multiplied together: two products for a whole group of layers, 2·o·m·(o + m) FLOPs a layer, where the exact path
(`apply_factors`) solves with Cholesky factors, layer by layer.

Both paths are the same function of the factors. They differ by rounding alone, of which `ReadyOperators.errors` are bounds for
any Y; `ReadyOperators.measured` has the errors for a Y like a gradient, which are far smaller where a side is ill-conditioned.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.core.dtypes import HALF
from gramian.curvature.apply.apply_factors import apply, full_vector, prepare, refuse_fallbacks
from gramian.curvature.apply.ready_sides import ReadySide, aligned, make_sides, side_tasks
from gramian.curvature.blocks.block import Block
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import BlockDiagonal, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.tensor_core_products import UNITS, Operand, Precision
from gramian.linalg.wide import exact_float32

ACCURATE = 0.01
"""Largest rounding error u·κ of a side, relative to the result, for which a precision is used on tensor cores."""


class SideProducts:
    """Products with stacked sides P, from the left (P Y) or from the right (Y P), in one precision."""

    def __init__(self, stacked: ReadySide, precision: Precision, side: Literal["left", "right"]) -> None:
        """Round the tensors of the stacked sides to the precision."""
        self._left = side == "left"
        wide = torch.float64 if precision == "fp64" else torch.float32
        self._scale_BN = None if stacked.scale is None else stacked.scale.to(wide)
        self._operands: list[Operand] = []
        if stacked.matrix is not None:
            self._operands.append(Operand.of(stacked.matrix, precision, side))
        elif stacked.left is not None and stacked.right is not None:  # V(UᵀY), or (Y U)Vᵀ, as P is symmetric
            pair = (stacked.right.mT, stacked.left) if self._left else (stacked.right, stacked.left.mT)
            self._operands += [Operand.of(t.contiguous(), precision, side) for t in pair]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        scale = 0 if self._scale_BN is None else self._scale_BN.nbytes
        return scale + sum(operand.nbytes for operand in self._operands)

    def times(self, y_BNK: Tensor) -> Tensor:
        """P Y for Y [blocks, n, k], or Y P for Y [blocks, k, n]."""
        out = y_BNK
        for operand in self._operands:
            out = operand.times(out)
        if self._scale_BN is None:
            return out
        scale = self._scale_BN[:, :, None] if self._left else self._scale_BN[:, None, :]
        return torch.addcmul(out, scale, y_BNK) if self._operands else scale * y_BNK


@dataclass(frozen=True)
class ReadyGroup:
    """Blocks of one shape whose sides have the same form: Y [blocks, o, m] becomes P_G Y P_A in two batched products."""

    blocks: tuple[Block, ...]
    G: SideProducts
    A: SideProducts | None
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of Y and of the results."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def apply(self, vector: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(Y, P_G Y P_A), both [blocks, o, m], for the blocks' parameters in `vector`; a missing one counts as zero.

        o and m are padded to `aligned` widths.
        """
        y_BOM = self._stacked(vector)
        out_BOM = self.G.times(y_BOM)
        return y_BOM, (out_BOM if self.A is None else self.A.times(out_BOM))

    def views(self, y_BOM: Tensor) -> Iterator[tuple[Block, dict[str, Tensor]]]:
        """(block, {parameter: view of its shape}) of all blocks in a stacked Y."""
        spec = self.blocks[0].spec
        for y_OM, block in zip(y_BOM, self.blocks, strict=True):
            yield block, block.spec.views(y_OM[: spec.outputs, : spec.inputs])

    @torch.no_grad()
    def error(self, place: int, block: Block, seed: int) -> Tensor:
        """‖P_G Y P_A − X‖/‖X‖, 0-dim float64, for a random X = x_G x_Aᵀ and Y = (G + λ_G I) X (A + λ_A I) with p = −1.

        `block`: the block at this place of the group, with the factors and the damping that its operators were made of.
        """
        generator, spec = torch.Generator().manual_seed(seed), block.spec
        one = torch.ones(1, 1, dtype=self.dtype, device=spec.device)
        x, y = {"A": one}, {"A": one}
        for side, (factor, value, _) in _damped_sides(block).items():
            x_N1 = torch.randn(factor.dim, 1, dtype=torch.float64, generator=generator).to(factor.device)
            x[side], y[side] = x_N1.to(self.dtype), (_product(factor, x_N1) + value * x_N1).to(self.dtype)
        exact_OM, y_OM = (vectors["G"] * vectors["A"].mT for vectors in (x, y))
        _, out_BOM = self.apply(spec.tensors(y_OM))
        off_OM = out_BOM[place, : spec.outputs, : spec.inputs] - exact_OM
        size: Tensor = torch.linalg.vector_norm(exact_OM, dtype=torch.float64)
        off: Tensor = torch.linalg.vector_norm(off_OM, dtype=torch.float64)
        return off / size

    def _stacked(self, vector: Mapping[str, Tensor]) -> Tensor:
        """The parameters of the blocks as Y [blocks, o, m], written by one multi-tensor copy."""
        spec = self.blocks[0].spec
        place = next(vector[name] for block in self.blocks for name in block.spec.parameters if name in vector)
        shape = (len(self.blocks), aligned(spec.outputs), aligned(spec.inputs))
        y_BOM = torch.empty(shape, dtype=self.dtype, device=place.device)
        y_BOM[:, spec.outputs :].zero_()
        y_BOM[:, :, spec.inputs :].zero_()
        to: list[Tensor] = []
        given: list[Tensor] = []
        for _, views in self.views(y_BOM):
            for name, part in views.items():
                t = vector.get(name)
                if t is None:
                    part.zero_()
                else:
                    to.append(part)
                    given.append(t.detach())
        torch._foreach_copy_(to, given)
        return y_BOM


class ReadyOperators:
    """(F + damping)^p of some blocks, ready to be applied; blocks that have no such form keep the exact path.

    ```python
    operators = ReadyOperators(state.blocks, -1.0, state.options, state.factorisations)
    natural = operators.apply(gradients)
    ```
    """

    def __init__(
        self, blocks: Mapping[str, Block], power: float, options: Options, factorisations: SharedFactorisation
    ) -> None:
        """Compute the operators. Collective where processes share factorisations.

        Args:
            blocks: {name: block}, with damping.
            power: the exponent p.
            options: of the K-FAC object.
            factorisations: shares the work among processes that have the same factors.
        """
        self.power, self.options, self.factorisations = power, options, factorisations
        self._blocks = dict(blocks)
        self._made_of = _made_of(blocks)
        self._as_made = {name: replace(block) for name, block in blocks.items()}  # alive: no new object has their id
        budget = "" if options.memory_budget is None else "memory_budget does not count operators"
        self.exact = {name: why for name, block in blocks.items() if (why := budget or _why_exact(block, power))}
        """{name of a block that keeps the exact path: why}."""
        fast = {name: block for name, block in blocks.items() if name not in self.exact}
        precisions = {name: _precision(block, power) for name, block in fast.items()}
        tasks = {name: side_tasks(block, power, precisions[name]) for name, block in fast.items()}

        def prepare_exact(members: Mapping[str, Block]) -> None:
            prepare(members, {name: block.G.dtype for name, block in members.items()}, power, options, factorisations)

        with torch.no_grad(), exact_float32():
            listed = [task for sides in tasks.values() for task in sides.values()]
            made = make_sides(listed, power, options.kfac_eps, prepare_exact)
            self.groups = _grouped(
                (fast[name], made[sides["G"].key], made[sides["A"].key] if "A" in sides else None, precisions[name])
                for name, sides in tasks.items()
            )
        self.errors = {name: _error(block, power, precisions[name]) for name, block in fast.items()}
        """{block: bound of the relative error of P_G Y P_A that rounding causes, for any Y}."""
        if options.strict:
            refuse_fallbacks(fast.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all operators."""
        return sum(side.nbytes for group in self.groups for side in (group.G, group.A) if side is not None)

    def facts(self) -> dict[str, Any]:
        """Facts about the operators as JSON values: precisions, bounds, bytes, and what keeps the exact path."""
        precisions: dict[str, int] = {}
        for group in self.groups:
            precisions[group.precision] = precisions.get(group.precision, 0) + len(group.blocks)
        return {
            "power": self.power,
            "blocks_by_precision": precisions,
            "groups": len(self.groups),
            "largest_error_bound": max(self.errors.values(), default=0.0),
            "largest_measured_error": max(self.measured.values(), default=None),
            "bytes": self.nbytes,
            "exact": dict(self.exact),
        }

    @cached_property
    def measured(self) -> dict[str, float]:
        """{block: relative error of its operators for a random Y}, of the block with the largest bound in each group.

        Y = (F + damping) X lies where F is large, as gradients do, and X of rank one is its exact natural gradient, so that
        nothing is factorised. Measured when first asked for, by this process alone: one product with all operators, and one of
        each side with a vector. Only inverses (p = −1) without a clip are measured.
        """
        found: dict[str, Tensor] = {}
        for number, group in enumerate(self.groups if self.power == -1 else ()):
            names = [block.spec.name for block in group.blocks]
            inverted = [name for name in names if _clips_nothing(self._as_made[name])]
            if inverted:
                name = max(inverted, key=self.errors.__getitem__)
                found[name] = group.error(names.index(name), self._as_made[name], self.options.seed + number)
        return {name: float(error) for name, error in found.items()}

    def fits(self, blocks: Mapping[str, Block], power: float) -> bool:
        """Whether these operators are those of `blocks` as they are now, factors and damping included, at this power."""
        return power == self.power and _made_of(blocks) == self._made_of

    def apply(self, vector: Mapping[str, Tensor], dots: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """{parameter: (F + damping)^p v} for all blocks that have a parameter in v = `vector`, on v's device.

        Results are views of stacked tensors in the precision of their products. A v in float64 whose operators are not, as
        after `model.double()`, takes the exact path, and so do shards of v. `dots`, if given, receives {block: 0-dim
        vᵀ(F + damping)^p v}, from which the length of a step follows without another pass over it.
        """
        found: dict[str, Tensor] = {}
        rest = {name: self._blocks[name] for name in self.exact if _touches(self._blocks[name], vector)}
        for group in self.groups:
            given = [block for block in group.blocks if _touches(block, vector)]
            parts = (vector[name] for block in given for name in block.spec.parameters if name in vector)
            if any(isinstance(part, DTensor) or part.dtype.itemsize > group.dtype.itemsize for part in parts):
                rest |= {block.spec.name: block for block in given}
            elif given:
                y_BOM, out_BOM = group.apply(vector)
                for _, views in group.views(out_BOM):
                    found |= {name: part for name, part in views.items() if name in vector}
                if dots is not None:
                    each = (y_BOM * out_BOM).sum((1, 2), dtype=torch.promote_types(group.dtype, torch.float32))
                    named = zip(group.blocks, each, strict=True)
                    dots |= {block.spec.name: dot for block, dot in named if _touches(block, vector)}
        if rest:
            inside = {name: block.spec.name for block in rest.values() for name in block.spec.parameters}
            given_rest = {name: t for name, t in vector.items() if name in inside}
            exact = apply(rest, given_rest, self.power, self.options, self.factorisations)
            found |= exact
            for name, t in given_rest.items() if dots is not None else ():
                assert dots is not None
                dot = full_vector((t * exact[name]).sum(dtype=torch.float64))
                dots[inside[name]] = dots[inside[name]] + dot if inside[name] in dots else dot
        return found


def _made_of(blocks: Mapping[str, Block]) -> list[tuple[object, ...]]:
    """What operators depend on: the very objects, which a refresh replaces, and the damping by value."""
    return [(name, id(b), id(b.A), id(b.G), b.damping, id(b.correction)) for name, b in blocks.items()]


def _touches(block: Block, vector: Mapping[str, Tensor]) -> bool:
    return any(name in vector for name in block.spec.parameters)


def _why_exact(block: Block, power: float) -> str:
    """Why a block has no ready operator; "" if it has one."""
    damping = block.damping
    assert damping is not None
    if block.correction is not None or block.corrected:
        return "EK-FAC's eigenvalues belong to both sides together"
    if damping.joint and block.A is not None:
        return "joint damping belongs to both sides together"
    for side, (factor, value, most) in _damped_sides(block).items():
        if isinstance(factor, LowRank | DiagonalLowRank) and factor.columns.others is not None:
            return f"the rows of {side} are sharded over processes"
        if isinstance(factor, BlockDiagonal):
            return "its blocks are applied together as they are"
        if factor.device.type != block.spec.device.type:
            return f"{side} is stored on another device"
        solved = power == -1 and factor.clips_nothing(value, most)
        if isinstance(factor, DiagonalLowRank) and not solved:
            return f"{side} is diagonal and low rank, which has no power but an unclipped inverse"
    return ""


def _conditions(block: Block) -> list[float]:
    """Bounds of the condition numbers of the damped sides G + λ_G I and A + λ_A I."""
    return [factor.condition(value, most)[0] for factor, value, most in _damped_sides(block).values()]


def _damped_sides(block: Block) -> dict[str, tuple[Factor, float, float | None]]:
    """{"G" and, of a Kronecker product, "A": (factor, its λ, largest condition number or None)}."""
    damping = block.damping
    assert damping is not None
    values = {"A": damping.lambda_A, "G": damping.lambda_G}
    return {side: (factor, values[side], damping.max_condition) for side, factor in block.factors.items()}


def _clips_nothing(block: Block) -> bool:
    """True if no eigenvalue of the damped sides has to be raised, as far as bounds show."""
    return all(factor.clips_nothing(value, most) for factor, value, most in _damped_sides(block).values())


def _product(factor: Factor, y_NK: Tensor) -> Tensor:
    """M Y in float64 for the factor's stored M; a low-rank M is widened a piece of its rows at a time."""
    if isinstance(factor, LowRank):
        return factor.columns.times(factor.columns.transposed_times(y_NK))
    return factor.to(dtype=torch.float64).matvec(y_NK)


def _precision(block: Block, power: float) -> Precision:
    """Precision of a block's products: the lowest whose rounding u, times the condition number of a side, is small enough.

    Rounding P_A multiplies the result by I + E with ‖E‖ ≤ u·κ(P_A), and likewise P_G. Factors that were rounded to half
    precision are multiplied on tensor cores of a GPU while u·κ ≤ `ACCURATE`; factors in float32 in float32, or in float64 where
    the exact path uses it.
    """
    damping = block.damping
    assert damping is not None
    wide = block.working_dtype(block.G.dtype, power)
    if wide == torch.float64:
        return "fp64"
    half = all(factor.storage_dtype in HALF or isinstance(factor, Diagonal) for factor in block.factors.values())
    if half and block.spec.device.type == "cuda" and block.A is not None:
        condition = max(_conditions(block)) ** abs(power)
        choices: tuple[Precision, ...] = ("bf16", "tf32", "bf16x3")
        for precision in choices:
            if UNITS[precision] * condition <= ACCURATE:
                return precision
    return "fp32"


def _error(block: Block, power: float, precision: Precision) -> float:
    """Bound of ‖P_G Y P_A − exact‖/‖exact‖ over all Y [o, m]: 4 (u + w(√o + √m)) max(κ_G^|p| κ_A^|p|, κ_G, κ_A).

    κ are condition numbers of the damped sides. P_G, P_A, Y and the product between them are rounded to the precision (u);
    products and the computation of P round to float64 or float32 (w), and such errors add up like √n over a side of n. The
    worst Y multiplies them by the condition number of P_G ⊗ P_A; errors w‖M + λI‖ of eigenvalues, by that of M + λI.
    """
    kappas, w = _conditions(block), UNITS["fp64" if precision == "fp64" else "fp32"]
    worst = max(math.prod(kappas) ** abs(power), *kappas)
    return 4 * (UNITS[precision] + w * (math.sqrt(block.spec.outputs) + math.sqrt(block.spec.inputs))) * worst


def _grouped(ready: Iterable[tuple[Block, ReadySide, ReadySide | None, Precision]]) -> list[ReadyGroup]:
    """Blocks whose matrices and sides have equal shapes, together."""
    found: dict[tuple[object, ...], list[tuple[Block, ReadySide, ReadySide | None, Precision]]] = {}
    for block, G, A, precision in ready:
        spec = block.spec
        key = (spec.outputs, spec.inputs, spec.device, G.form, None if A is None else A.form, precision)
        found.setdefault(key, []).append((block, G, A, precision))
    groups: list[ReadyGroup] = []
    for members in found.values():
        blocks, Gs, As, (precision, *_) = zip(*members, strict=True)
        outputs = SideProducts(ReadySide.stack([G.padded() for G in Gs]), precision, "left")
        inputs = None
        if As[0] is not None:
            inputs = SideProducts(ReadySide.stack([A.padded() for A in As if A is not None]), precision, "right")
        groups.append(ReadyGroup(blocks, outputs, inputs, precision))
    return groups
