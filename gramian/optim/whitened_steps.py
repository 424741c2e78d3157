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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.curvature.blocks.block import Block
from gramian.kernels.matrix_steps import direction_scales, scaled_stack
from gramian.linalg import Diagonal, Factor
from gramian.linalg.inverse_roots import inverse_fourth_root
from gramian.optim.orthogonalise import SCALE, orthogonaliser

STACKED = 2**27
"""Largest number of entries of the matrices whose roots are computed together."""


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
        """XXᵀ of every matrix, in float32 for float16 on a GPU, else in the dtype of X."""
        x_BRN = self.x_BRN
        wide = x_BRN.is_cuda and x_BRN.dtype == torch.float16
        return torch.bmm(x_BRN, x_BRN.mT, out_dtype=torch.float32) if wide else x_BRN @ x_BRN.mT

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
    _made_of: list[tuple[str, Factor, Factor]] = field(default_factory=list)

    def update(self, blocks: Mapping[str, Block], weights: Mapping[str, Tensor]) -> None:
        """Make the operators of `blocks` {name of the weight: its block}, unless they are made of the same factors already.

        `weights` are the parameters themselves, of which dtype and device are read.
        """
        now = [(name, _input_factor(block), block.G) for name, block in blocks.items()]
        if len(now) == len(self._made_of) and all(
            a[0] == b[0] and a[1] is b[1] and a[2] is b[2] for a, b in zip(now, self._made_of, strict=True)
        ):
            return
        self.groups = []  # frees the old operators before the new ones are made
        sides = {name: _sides(block) for name, block in blocks.items()}
        roots = _roots([side for pair in sides.values() for side in pair], self.damping)
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
            of_sides = [
                [roots[id(factor), width] for factor, width in (sides[n][side] for n in names)] for side in (0, 1)
            ]
            P_A, P_G = (torch.stack([one.root for one in each]).to(example.device) for each in of_sides)
            traces_A, traces_G = (
                torch.stack([one.trace for one in each]).to(example.device, wide).clamp(min=0) for each in of_sides
            )
            least_B = NOTHING * (traces_A.sqrt() * traces_G.sqrt()).clamp(min=1e-30)
            turned = P_G.shape[1] > P_A.shape[1]
            P, D = (P_A, P_G) if turned else (P_G, P_A)
            P, D = P if P.dim() == 3 else P[:, :, None], D if D.dim() == 3 else D[:, None, :]
            least_B11, in_out = least_B[:, None, None], blocks[names[0]].spec.layout == "in_out"
            self.groups.append(MatrixGroup(tuple(names), turned, P.to(dtype), D.to(dtype), least_B11, in_out))
        self._made_of, self.made = now, self.made + 1


def lambdas(blocks: Sequence[Block], damping: float) -> list[tuple[float, float]]:
    """(λ_A, λ_G) = (δā, δḡ) of every block: (A/ā + δI)^(−1/4) is (A + λ_A I)^(−1/4) times a number. Waits for the device."""
    means = [_unless_zero(factor.diagonal()[:width].mean()) for block in blocks for factor, width in _sides(block)]
    if not means:
        return []
    values = (damping * torch.stack([mean.double().to(means[0].device) for mean in means])).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def _input_factor(block: Block) -> Factor:
    assert block.A is not None, "a Kronecker product has both factors"
    return block.A


def _sides(block: Block) -> tuple[Side, Side]:
    """(A, number of inputs), (G, number of outputs) of a block."""
    return (_input_factor(block), block.spec.inputs - block.spec.has_bias), (block.G, block.spec.outputs)


class Root(NamedTuple):
    """(M/mean + δI)^(−1/4) of the first n coordinates of a factor M, [n, n], or [n] for a diagonal M."""

    root: Tensor
    trace: Tensor
    """Trace of these coordinates of M, 0-dim."""


def _roots(sides: Sequence[Side], damping: float) -> dict[tuple[int, int], Root]:
    """{(id of a factor, n): the root of its first n coordinates}; those of one width are taken together."""
    found: dict[tuple[int, int], Root] = {}
    stacks: dict[tuple[int, torch.dtype, torch.device, bool], dict[int, Factor]] = {}
    for factor, width in sides:
        key = (width, factor.dtype, factor.device, isinstance(factor, Diagonal))
        stacks.setdefault(key, {})[id(factor)] = factor
    for (width, _, _, diagonal), factors in stacks.items():
        each, keys = max(1, STACKED // (width if diagonal else width * width)), list(factors)
        for begin in range(0, len(keys), each):
            some = keys[begin : begin + each]
            roots = _diagonal_roots if diagonal else _dense_roots
            root_B, trace_B = roots([factors[key] for key in some], width, damping)
            found |= {(key, width): Root(*pair) for key, *pair in zip(some, root_B, trace_B, strict=True)}
    return found


def _diagonal_roots(factors: Sequence[Factor], width: int, damping: float) -> tuple[Tensor, Tensor]:
    values_BN = torch.stack([factor.diagonal()[:width] for factor in factors])
    traces_B = values_BN.sum(-1)
    return (values_BN / _unless_zero(traces_B / width)[:, None] + damping).pow(-0.25), traces_B


def _dense_roots(factors: Sequence[Factor], width: int, damping: float) -> tuple[Tensor, Tensor]:
    stack_BNN = torch.stack([factor.dense()[:width, :width] for factor in factors])
    traces_B = stack_BNN.diagonal(dim1=-2, dim2=-1).sum(-1)
    stack_BNN /= _unless_zero(traces_B / width)[:, None, None]
    stack_BNN.diagonal(dim1=-2, dim2=-1).add_(damping)
    bound = (width + damping * width**0.5) / damping  # the trace of M/mean is n, so its norm is at most n
    return inverse_fourth_root(stack_BNN, bound), traces_B


def _unless_zero(means: Tensor) -> Tensor:
    """The means, 1 where one is not positive."""
    return torch.where(means > 0, means, 1.0)
