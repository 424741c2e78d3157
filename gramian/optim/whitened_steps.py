"""The step of weight matrices along orthogonalised momentum in the coordinates in which K-FAC's curvature is even.

For a layer with weight W [o, m], K-FAC factors A and G and averaged gradient N, all matrices of one shape in one stack:

    U = P_G · orth(P_G N P_A) · P_A,    P_A = (A/ā + δI)^(−1/4),    P_G = (G/ḡ + δI)^(−1/4),

ā and ḡ the mean eigenvalues. In the coordinates W' = P_G⁻¹ W P_A⁻¹, whose Fisher is the square root of K-FAC's, this is
steepest descent in the spectral norm. A factor that is stored as its diagonal has a diagonal P. U is scaled to a root mean
square of 1, so the size of a step depends on the learning rate alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramian.curvature.blocks.block import Block
from gramian.linalg import Diagonal, Factor
from gramian.linalg.inverse_roots import inverse_fourth_root
from gramian.optim.orthogonalise import orthogonalised, scaled_to_one

STACKED = 2**27
"""Largest number of entries of the matrices whose roots are computed together."""


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of a step's products: bfloat16 on a GPU, which a direction of even singular values bears; else the weight's."""
    if weight.dtype == torch.float64 or not weight.is_cuda:
        return weight.dtype
    return torch.bfloat16


@dataclass(frozen=True)
class MatrixGroup:
    """Weights of one shape, whose steps are computed together."""

    names: tuple[str, ...]
    P_A: Tensor
    """P_A [blocks, m, m], or its diagonal [blocks, 1, m], in the dtype of the step's products."""
    P_G: Tensor
    """P_G [blocks, o, o], or its diagonal [blocks, o, 1]."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the step's products."""
        return self.P_A.dtype

    def direction(self, n_BOM: Tensor, places: Sequence[int]) -> Tensor:
        """U with a root mean square of 1 for every averaged gradient N [o, m] in a stack; `places`: their places in `names`.

        N in `dtype`; U in float32, or float64 for float64 weights, and zero for a zero gradient.
        """
        whole = len(places) == len(self.names)
        P_A, P_G = (p if whole else p[list(places)] for p in (self.P_A, self.P_G))
        return scaled_to_one(_between(P_G, orthogonalised(_between(P_G, n_BOM, P_A)), P_A))


def _between(P_G: Tensor, y_BOM: Tensor, P_A: Tensor) -> Tensor:
    """P_G Y P_A for full or diagonal P_G and P_A."""
    y_BOM = y_BOM * P_A if P_A.shape[-2] == 1 else y_BOM @ P_A
    return P_G * y_BOM if P_G.shape[-1] == 1 else P_G @ y_BOM


Side = tuple[Factor, int]
"""A factor, and the number of its first coordinates that belong to the weight: all but a bias's."""


@dataclass
class WhitenedSteps:
    """The groups of weights that step together, with the operators of the current factors; made anew when factors change."""

    damping: float
    """δ, relative to the mean eigenvalue of a factor."""
    groups: list[MatrixGroup] = field(default_factory=list)
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
            members.setdefault((o, m, diagonal, weights[name].dtype, weights[name].device), []).append(name)
        for names in members.values():
            example = weights[names[0]]
            found = [[roots[id(factor), width] for factor, width in sides[name]] for name in names]
            P_A = torch.stack([A if A.dim() == 2 else A[None, :] for A, _ in found])
            P_G = torch.stack([G if G.dim() == 2 else G[:, None] for _, G in found])
            dtype = compute_dtype(example)
            self.groups.append(MatrixGroup(tuple(names), P_A.to(example.device, dtype), P_G.to(example.device, dtype)))
        self._made_of = now


def lambdas(blocks: Sequence[Block], damping: float) -> list[tuple[float, float]]:
    """(λ_A, λ_G) = (δā, δḡ) of every block: (A/ā + δI)^(−1/4) is (A + λ_A I)^(−1/4) times a number. Waits for the device."""
    means = [_mean(factor.diagonal()[:width]) for block in blocks for factor, width in _sides(block)]
    if not means:
        return []
    values = (damping * torch.cat([mean.double().to(means[0].device) for mean in means])).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def _input_factor(block: Block) -> Factor:
    assert block.A is not None, "a Kronecker product has both factors"
    return block.A


def _sides(block: Block) -> tuple[Side, Side]:
    """(A, number of inputs), (G, number of outputs) of a block."""
    return (_input_factor(block), block.spec.inputs - block.spec.has_bias), (block.G, block.spec.outputs)


def _roots(sides: Sequence[Side], damping: float) -> dict[tuple[int, int], Tensor]:
    """{(id of a factor M, n): (M/mean + δI)^(−1/4)} of the first n coordinates of M, [n, n], or [n] for a diagonal M.

    Matrices of one width are taken together.
    """
    found: dict[tuple[int, int], Tensor] = {}
    stacks: dict[tuple[int, torch.dtype, torch.device], dict[int, Factor]] = {}
    for factor, width in sides:
        if isinstance(factor, Diagonal):
            values_N = factor.values_N[:width]
            found[id(factor), width] = (values_N / _mean(values_N) + damping).pow(-0.25)
        else:
            stacks.setdefault((width, factor.dtype, factor.device), {})[id(factor)] = factor
    for (width, _, _), factors in stacks.items():
        each, keys = max(1, STACKED // (width * width)), list(factors)
        for begin in range(0, len(keys), each):
            some = keys[begin : begin + each]
            stack_BNN = torch.stack([factors[key].dense()[:width, :width] for key in some])
            stack_BNN /= _mean(stack_BNN.diagonal(dim1=-2, dim2=-1))[..., None]
            stack_BNN.diagonal(dim1=-2, dim2=-1).add_(damping)
            bound = (width + damping * width**0.5) / damping  # the trace of M/mean is n, so its norm is at most n
            roots_BNN = inverse_fourth_root(stack_BNN, bound)
            found |= {(key, width): root for key, root in zip(some, roots_BNN, strict=True)}
    return found


def _mean(values_N: Tensor) -> Tensor:
    """Mean over the last axis, which stays as 1; 1 where it is 0."""
    mean = values_N.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, mean, 1.0)
