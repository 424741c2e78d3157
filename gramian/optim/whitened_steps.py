"""The step of weight matrices along orthogonalised momentum in the coordinates in which K-FAC's curvature is even.

For a layer with weight W [o, m], K-FAC factors A and G and averaged gradient N, all matrices of one shape in one stack:

    U = P_G · orth(P_G N P_A) · P_A,    P_A = (A/ā + δI)^(−1/4),    P_G = (G/ḡ + δI)^(−1/4),

ā and ḡ the mean eigenvalues. In the coordinates W' = P_G⁻¹ W P_A⁻¹, whose Fisher is the square root of K-FAC's, this is
steepest descent in the spectral norm. A factor that is stored as its diagonal has a diagonal P. U is scaled to a root mean
square of 1, so the size of a step depends on the learning rate alone, unless there is no gradient (`NOTHING`).

orth multiplies by a polynomial q of the Gram matrix (`orthogonalise`). With N written as r × n, r ≤ n, P of the narrower side
and D of the wider one,

    X = P N D,    U = P · q(XXᵀ) · X D:

three products with n columns, and all else r × r.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.core.keyed_random import token_keys
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.refresh.shared_factorisation import SharedTensor, assign, share_tensors
from gramian.kernels.matrix_steps import direction_scales, scaled_stack
from gramian.linalg import Diagonal, Factor
from gramian.linalg.factors.factor import fetch_bounds
from gramian.linalg.inverse_roots import Roots, dense_roots, relative_roots, root_dtype, root_products, unless_zero
from gramian.optim.orthogonalise import SCALE, orthogonaliser
from gramian.parallel.exchange import Exchange

SPARED = 2**25
"""Processes share roots where that spares each of them at least this Σ n³ (5 to 10 ms on a CPU, where sharing costs 3 to 5)."""
MEASURED = 2
"""Number of roots whose error the record states."""


NOTHING = 1e-8
"""Averaged gradients smaller than this, over the size of the gradient of one token, are what is left of earlier ones in the
momentum of a layer whose gradient is zero now: its steps end with it."""


@dataclass(frozen=True)
class MatrixGroup:
    """Weights [o, m] of one shape, memory layout and sharding, whose steps are computed together."""

    names: tuple[str, ...]
    turned: bool
    """Whether o > m: then matrices are taken as their transposes, and the narrower side is the input's."""
    P: Tensor
    """P of the narrower side [blocks, r, r], or its diagonal [blocks, r, 1], in the dtype of the step's products."""
    D: Tensor
    """P of the wider side [blocks, n, n], or its diagonal [blocks, 1, n], likewise."""
    least: Tensor
    """Norm of N [blocks, 1, 1] below which a direction is shorter: `NOTHING` · √(tr A · tr G), in float32 or float64."""
    in_out: bool = False
    """Whether weights are stored as [m, o]."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which averaged gradients are stacked: bfloat16, which has their range, where products are in float16."""
        return torch.bfloat16 if self.P.dtype == torch.float16 else self.P.dtype

    def whitened(self, n_BOM: Tensor, places: Sequence[int]) -> "WhitenedGradients":
        """Averaged gradients N [o, m] in a stack, in `gradient_dtype`, as X; `places` are those of their weights in `names`."""
        whole = len(places) == len(self.names)
        P, D, least_B11 = (t if whole else t[list(places)] for t in (self.P, self.D, self.least))
        n_BRN = n_BOM.mT if self.turned else n_BOM
        sizes_B11, diagonal = _norms(n_BRN, (-2, -1)), D.shape[-2] == 1
        y_BRN = scaled_stack(n_BRN, SCALE, sizes_B11, P.dtype, D if diagonal else None)  # in the range of float16
        x_BRN = _times(P, y_BRN if diagonal else y_BRN @ D)
        return WhitenedGradients(x_BRN, P, D, sizes_B11, least_B11, self.turned)


@dataclass(frozen=True)
class WhitenedGradients:
    """Averaged gradients of weights of one shape as X = P N D, on their way to the direction U."""

    x_BRN: Tensor
    P: Tensor
    D: Tensor
    sizes_B11: Tensor
    """‖N‖, in float32 or float64."""
    least_B11: Tensor
    """Below this size, U has a root mean square of ‖N‖/`least` instead of 1."""
    turned: bool

    @property
    def grams(self) -> Tensor:
        """XXᵀ of every matrix, as `_grams` has it."""
        return _grams(self.x_BRN)

    def direction(self, q_BRR: Tensor) -> tuple[Tensor, Tensor]:
        """(Z, d) with U = d·Z [o, m], for the polynomials q(XXᵀ); d broadcasts to Z, in float32, or float64 for float64 X."""
        z_BRN = _times(_times(self.P, q_BRR), self.x_BRN)
        z_BRN, D = (z_BRN, self.D) if self.D.shape[-2] == 1 else (z_BRN @ self.D, None)
        size = (z_BRN.shape[-2] * z_BRN.shape[-1]) ** 0.5
        d_B1N = direction_scales(_norms(z_BRN, (-2,)), D, self.sizes_B11, self.least_B11, size)
        return (z_BRN.mT, d_B1N.mT) if self.turned else (z_BRN, d_B1N)


def directions(several: Sequence[WhitenedGradients]) -> list[tuple[Tensor, Tensor]]:
    """(Z, d) with the directions U = d·Z of stacks whose narrower sides have one width, dtype and device.

    U has a root mean square of 1, less where N is smaller than `least`, and is zero for N = 0. 6 r²n + 30 r³ FLOPs a matrix
    with a diagonal D. All Gram matrices are orthogonalised in one stack.
    """
    grams = [one.grams for one in several]
    q_BRR = orthogonaliser(grams[0] if len(grams) == 1 else torch.cat(grams), several[0].P.dtype)
    parts = q_BRR.split([len(gram) for gram in grams])
    return [one.direction(part) for one, part in zip(several, parts, strict=True)]


def product_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of a step's products: float16 on a GPU, which a direction of even singular values bears; else float32 or wider."""
    if weight.dtype == torch.float64:
        return torch.float64
    return torch.float16 if weight.is_cuda else torch.float32


def _norms(x_BOM: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Norms over some axes of a stack, which stay as 1, in float32, or float64 if given so."""
    dtype = torch.promote_types(x_BOM.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(x_BOM, dim=axes, keepdim=True, dtype=dtype)
    return found


def _grams(x_BRN: Tensor) -> Tensor:
    """XXᵀ of every matrix of a stack, in float32 for float16, else in the dtype of X."""
    if x_BRN.dtype != torch.float16:
        return x_BRN @ x_BRN.mT
    return torch.bmm(x_BRN, x_BRN.mT, out_dtype=torch.float32) if x_BRN.is_cuda else x_BRN.float() @ x_BRN.float().mT


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Product of two stacks of matrices, stored by rows or by columns as `right` is; `left` may be a diagonal, as a column."""
    if left.shape[-1] == 1:
        return left * right
    return left @ right if right.stride(-1) == 1 else (right.mT @ left.mT).mT


Side = tuple[Factor, int]
"""A factor, and the number of its first coordinates that belong to the weight: all but a bias's."""


@dataclass
class WhitenedSteps:
    """The groups of weights that step together, with the operators of the current factors; made anew when factors change."""

    damping: float
    """δ, relative to the mean eigenvalue of a factor."""
    groups: list[MatrixGroup] = field(default_factory=list)
    made: int = 0
    """How often the operators were made."""
    roots: tuple[int, int] = (0, 0)
    """Numbers of roots of full factors that this process computed, and that all processes did, when they were last made."""
    _made_of: list[tuple[str, Factor, Factor]] = field(default_factory=list)
    _measured: dict[str, Any] = field(default_factory=dict)

    def update(self, blocks: Mapping[str, Block], weights: Mapping[str, Tensor], shares: int) -> None:
        """Make the operators of `blocks` {name of the weight: its block}, unless they are made of the same factors already.

        `weights` are the parameters themselves, of which dtype and device are read; `shares`: see `make`.
        """
        now, before = (
            [(name, id(A), id(G)) for name, A, G in made_of] for made_of in (_factors_of(blocks), self._made_of)
        )
        if now != before:
            self.make(blocks, weights, shares=shares)

    def make(
        self,
        blocks: Mapping[str, Block],
        weights: Mapping[str, Tensor],
        exchange: Exchange | None = None,
        shares: int = 1,
    ) -> None:
        """Make the operators, as `update` does, whatever they are made of now.

        `exchange`: the processes that have the same factors make them together, each process the roots of its share
        (collective); None: this process makes all, as `shares` processes would have made them.
        """
        self.groups, self._made_of = [], []  # frees the old operators before the new ones are made
        sides = {name: _sides(block) for name, block in blocks.items()}
        roots, self.roots = _roots(sides, self.damping, exchange, shares)
        members: dict[tuple[object, ...], list[str]] = {}
        for name, ((A, m), (G, o)) in sides.items():
            diagonal = (isinstance(A, Diagonal), isinstance(G, Diagonal))
            weight, spec = weights[name], blocks[name].spec
            sharding = weight.placements if isinstance(weight, DTensor) else None
            key = (o, m, diagonal, spec.layout, weight.shape, sharding, weight.dtype, weight.device)
            members.setdefault(key, []).append(name)
        for names in members.values():
            example = weights[names[0]]
            dtype = product_dtype(example)
            wide = torch.promote_types(dtype, torch.float32)
            of_sides = [[sides[name][side] for name in names] for side in (0, 1)]
            P_A, P_G = (torch.stack([roots[id(f), n].to(example.device, dtype) for f, n in each]) for each in of_sides)
            traces_A, traces_G = (
                torch.stack([f.diagonal()[:n].to(example.device, wide) for f, n in each]).sum(-1).clamp(min=0)
                for each in of_sides
            )
            least_B = NOTHING * (traces_A.sqrt() * traces_G.sqrt()).clamp(min=1e-30)
            turned = P_G.shape[1] > P_A.shape[1]
            P, D = (P_A, P_G) if turned else (P_G, P_A)
            P, D = P if P.dim() == 3 else P[:, :, None], D if D.dim() == 3 else D[:, None, :]
            least_B11, in_out = least_B[:, None, None], blocks[names[0]].spec.layout == "in_out"
            self.groups.append(MatrixGroup(tuple(names), turned, P, D, least_B11, in_out))
        self._made_of, self.made = _factors_of(blocks), self.made + 1

    def facts(self) -> dict[str, Any] | None:
        """Facts about the operators as JSON values: precisions, bytes and measured errors; None while there are none.

        Errors are measured at the first call, and again once the operators were made twice as often as then ("made" in
        "measured"): an eigendecomposition in float64 may take longer than a step. See `_root_errors`, `_singular_values`.
        """
        if not self.groups:
            return None
        if not self._measured or self.made >= 2 * self._measured["made"]:
            example = self.groups[0].P
            self._measured = {
                "made": self.made,
                "root_errors": self._root_errors(),
                "singular_values": _singular_values(example.dtype, example.device),
            }
        factors = [factor for _, *pair in self._made_of for factor in pair if not isinstance(factor, Diagonal)]
        return {
            "root_products": sorted({root_products(factor.dtype, factor.device) for factor in factors}),
            "step_products": sorted({str(group.P.dtype).removeprefix("torch.") for group in self.groups}),
            "groups": len(self.groups),
            "bytes": sum(group.P.nbytes + group.D.nbytes for group in self.groups),
            "made": self.made,
            "roots": {"here": self.roots[0], "all": self.roots[1]},
            "measured": dict(self._measured),
        }

    def described(self, record: dict[str, Any], blocks: Mapping[str, Block]) -> dict[str, Any]:
        """The `record` of a curvature with `blocks`, to which the damping of these steps and facts of the operators are added.

        κ of A is a bound where a layer has a bias, whose coordinate takes no part in the step. Waits for the device.
        """
        fetch_bounds([factor for block in blocks.values() for factor in block.factors.values()])
        record["options"] |= {"damping": self.damping, "damping_mode": "relative", "use_eigenvalue_correction": False}
        record["operators"] = self.facts()
        for (name, block), (lambda_A, lambda_G) in zip(
            blocks.items(), lambdas([*blocks.values()], self.damping), strict=True
        ):
            layer = record["layers"][name]
            layer |= {"damping_mode": "relative", "pi": None, "lambda_A": lambda_A, "lambda_G": lambda_G}
            layer |= {"kappa_max": None, "clip_joint": None}
            for side, factor in block.factors.items():
                kappa, exact = factor.condition(lambda_A if side == "A" else lambda_G, None)
                exact = exact and not (side == "A" and block.spec.has_bias)
                layer["sides"][side] |= {"kappa": kappa, "kappa_exact": exact, "clip": None}
        return record

    def _root_errors(self) -> dict[str, float]:
        """{weight and side: relative error ‖P − R‖/‖R‖ (Frobenius) of its root P} of `MEASURED` full factors.

        R is the root by eigenvectors in float64. Factors are drawn by `made`: the same on all processes.
        """
        factors = {name: (A, G) for name, A, G in self._made_of}
        full = [
            (f"{name} {side}", factor, (group.P if group.turned == (side == "A") else group.D)[place])
            for group in self.groups
            for place, name in enumerate(group.names)
            for side, factor in zip("AG", factors[name], strict=True)
            if not isinstance(factor, Diagonal)
        ]
        drawn = token_keys(self.made, torch.arange(len(full)), 1)[:, 0].argsort()[:MEASURED].tolist()
        found = {}
        for label, factor, root_NN in (full[i] for i in drawn):
            exact_NN = dense_roots([factor], len(root_NN), self.damping, torch.float64)[0]
            found[label] = float((root_NN.to(exact_NN) - exact_NN).norm() / exact_NN.norm())
        return found


def _singular_values(dtype: torch.dtype, device: torch.device) -> list[float]:
    """[smallest, largest] singular value of orth(X) for an X [64, 64] whose own, over ‖X‖_F, lie in [0.003, 0.38]."""
    generator = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(2, 64, 64, dtype=torch.float64, generator=generator)).Q
    x_RR = (bases[0] * torch.logspace(-2.5228, -0.4437, 64, dtype=torch.float64)) @ bases[1]
    x_1RR = (SCALE * x_RR / x_RR.norm())[None].to(device, dtype)
    q_RR = orthogonaliser(_grams(x_1RR), dtype)[0].double()
    values: Tensor = torch.linalg.svdvals((q_RR @ x_1RR[0].double() / x_1RR.double().norm()).cpu())
    return [float(values[-1]), float(values[0])]


def worth_sharing(specs: Iterable[Spec], size: int) -> bool:
    """Whether sharing roots among `size` processes spares each enough of them, from the shapes of the blocks' weights alone."""
    widths = [(spec.inputs - spec.has_bias, spec.outputs) for spec in specs if spec.kind == "kronecker"]
    costs = [float(min(pair)) ** 3 for pair in widths for _ in range(1 + (pair[0] == pair[1]))]
    loads = [0.0] * size
    for cost, owner in zip(costs, assign(costs, size), strict=True):
        loads[owner] += cost
    return sum(costs) - max(loads) >= SPARED


def lambdas(blocks: Sequence[Block], damping: float) -> list[tuple[float, float]]:
    """(λ_A, λ_G) = (δā, δḡ) of every block: (A/ā + δI)^(−1/4) is (A + λ_A I)^(−1/4) times a number. Waits for the device."""
    means = [unless_zero(factor.diagonal()[:width].mean()) for block in blocks for factor, width in _sides(block)]
    if not means:
        return []
    values = (damping * torch.stack([mean.double().to(means[0].device) for mean in means])).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def _factors_of(blocks: Mapping[str, Block]) -> list[tuple[str, Factor, Factor]]:
    """(name of the weight, A, G) of every block."""
    return [(name, _input_factor(block), block.G) for name, block in blocks.items()]


def _input_factor(block: Block) -> Factor:
    assert block.A is not None, "a Kronecker product has both factors"
    return block.A


def _sides(block: Block) -> tuple[Side, Side]:
    """(A, number of inputs), (G, number of outputs) of a block."""
    return (_input_factor(block), block.spec.inputs - block.spec.has_bias), (block.G, block.spec.outputs)


def _roots(
    sides: Mapping[str, tuple[Side, Side]], damping: float, exchange: Exchange | None, shares: int
) -> tuple[Roots, tuple[int, int]]:
    """The roots of all sides, and how many of full factors this process and all processes computed.

    With an `exchange` each of these is computed by one process, those of diagonals by all; without, this process computes all,
    in the stacks that this many processes (`shares`) would have, whose products a GPU rounds the same way.
    """
    full: dict[tuple[int, int], tuple[str, Factor]] = {}
    rest: dict[tuple[int, int], Factor] = {}
    for name in sorted(sides):  # the same order on all processes
        for side, (factor, width) in zip("AG", sides[name], strict=True):
            if isinstance(factor, Diagonal):
                rest[id(factor), width] = factor
            else:
                full.setdefault((id(factor), width), (f"{name} {side}", factor))
    keys, here = list(full), list(full)
    if exchange is None:
        found = relative_roots(rest, damping)
        owners = assign([float(width**3) for _, width in keys], shares)
        for share in range(shares):
            found |= relative_roots(
                {k: full[k][1] for k, own in zip(keys, owners, strict=True) if own == share}, damping
            )
        return found, (len(full), len(full))

    def compute(places: list[int]) -> list[Tensor]:
        here[:] = [keys[place] for place in places]
        found = relative_roots({key: full[key][1] for key in here}, damping)
        return [found[key] for key in here]

    wanted = [
        SharedTensor(label, width**3, (width, width), root_dtype(factor.dtype, factor.device), factor.device)
        for (_, width), (label, factor) in full.items()
    ]
    shared = dict(zip(keys, share_tensors(exchange, wanted, compute), strict=True))
    return shared | relative_roots(rest, damping), (len(here), len(full))
