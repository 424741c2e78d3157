"""Matrix products between hidden states and a head, and their gradients, one chunk of tokens at a time.

Legend: N tokens (n of a chunk), D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.loss.head import Head
from gramian.kernels.distillation.distill_rows import Squash

ALIGNMENT = 64
"""Row strides and product sizes are multiples of this: at a stride of 50,257 a GPU's matrix units read two bytes at a time."""

ADDMM_INTO_FLOAT32 = (2, 10)
"""First release of torch whose addmm adds a product of two-byte matrices to a float32 matrix in place."""


@dataclass(frozen=True)
class Projection:
    """Hidden states and head of one model, detached and in the dtype in which they are multiplied."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    squash: Squash

    @property
    def vocabulary(self) -> int:
        """Number of token ids V of the head."""
        return self.weight_VD.shape[0]

    def buffer(self, tokens: int) -> Tensor:
        """Uninitialised memory for the products of `tokens` tokens, [tokens, V] with aligned rows."""
        width = -(-self.vocabulary // ALIGNMENT) * ALIGNMENT
        padded = self.hidden_ND.new_empty((tokens, width))
        # Set to 0: products in bfloat16 on a CPU read one number beyond an odd row and multiply it by 0.
        padded[:, self.vocabulary :] = 0
        return padded[:, : self.vocabulary]

    def products_(self, tokens: slice, out_nV: Tensor) -> Tensor:
        """Compute h Wᵀ + b for the tokens of a slice into the first rows of `out_nV`; returns these rows."""
        hidden_nD = self.hidden_ND[tokens]
        out_nV = out_nV[: len(hidden_nD)]
        for ids in _id_blocks(self.weight_VD):
            weight_DV = self.weight_VD[ids].mT
            if self.bias_V is None:
                torch.mm(hidden_nD, weight_DV, out=out_nV[:, ids])
            else:
                torch.addmm(self.bias_V[ids], hidden_nD, weight_DV, out=out_nV[:, ids])
        return out_nV


def projection_of(hidden_ND: Tensor, head: Head) -> Projection:
    """Hidden states and head, cast to autocast's dtype if it is on, else to the wider dtype of the two; float64 is not cast.

    Cost: a copy of each tensor that has another dtype.
    """
    dtype = torch.promote_types(hidden_ND.dtype, head.weight_VD.dtype)
    kind = hidden_ND.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    bias_V = None if head.bias_V is None else head.bias_V.detach().to(dtype)
    return Projection(hidden_ND.detach().to(dtype), head.weight_VD.detach().to(dtype), bias_V, head.squash)


def check_sides(hidden_ND: Tensor, head: Head, tokens: int, side: str) -> None:
    """Raise `GramianError` unless hidden states of `tokens` tokens and head fit together; `side`: "student" or "teacher"."""
    for name, tensor in (("hidden", hidden_ND), ("weight", head.weight_VD)):
        if not isinstance(tensor, Tensor):
            raise GramianError(f"{side}_{name}: {type(tensor).__name__}; expected a tensor, or a Head for a weight")
        if tensor.dim() != 2 or not tensor.dtype.is_floating_point:
            raise GramianError(
                f"{side}_{name}: {tensor.dtype} {list(tensor.shape)}; expected floating point numbers of 2 dimensions"
            )
    if hidden_ND.shape[0] != tokens:
        raise GramianError(f"{side}_hidden: {hidden_ND.shape[0]} tokens; expected {tokens}, as many as targets")
    if hidden_ND.shape[1] != head.weight_VD.shape[1]:
        raise GramianError(
            f"{side}_weight: width {head.weight_VD.shape[1]}; expected {hidden_ND.shape[1]}, the width of {side}_hidden"
        )
    if not len(head.weight_VD):
        raise GramianError(f"{side}_weight: no rows; expected one for each id of the vocabulary")
    if head.bias_V is not None and head.bias_V.shape != head.weight_VD.shape[:1]:
        raise GramianError(f"{side}_weight: bias {list(head.bias_V.shape)}; expected [{len(head.weight_VD)}]")


def _id_blocks(weight_VD: Tensor) -> list[slice]:
    """Slices of ids that are multiplied at once: all ids; on a GPU those up to a multiple of ALIGNMENT, and the rest."""
    vocabulary = len(weight_VD)
    aligned = vocabulary // ALIGNMENT * ALIGNMENT
    if not weight_VD.is_cuda or aligned in (0, vocabulary):
        return [slice(0, vocabulary)]
    return [slice(0, aligned), slice(aligned, vocabulary)]


class HeadGradients:
    """Gradients of hidden states (dz W), weight (dzᵀ h) and bias (Σ dz) from dz, the gradient of z = h Wᵀ + b, over chunks.

    The gradient of the weight is summed in float32, or float64 for float64 inputs; the caller rounds it once. The flags
    `hidden`, `weight` and `bias` select the gradients to compute; the others stay None.
    """

    def __init__(self, side: Projection, wide: torch.dtype, hidden: bool, weight: bool, bias: bool) -> None:
        self.side = side
        self.hidden_ND = torch.empty_like(side.hidden_ND) if hidden else None
        self.weight_VD = torch.zeros_like(side.weight_VD, dtype=wide) if weight else None
        self.bias_V = side.weight_VD.new_zeros(side.vocabulary, dtype=wide) if bias else None

    def add_(self, tokens: slice, dz_nV: Tensor) -> None:
        """Add the gradients of one chunk: of the tokens of a slice, with dz [n, V] the gradient of their products."""
        for ids in _id_blocks(self.side.weight_VD):
            if self.hidden_ND is not None:
                out_nD, dz_nB, weight_BD = self.hidden_ND[tokens], dz_nV[:, ids], self.side.weight_VD[ids]
                if ids.start == 0:
                    torch.mm(dz_nB, weight_BD, out=out_nD)
                else:
                    out_nD.addmm_(dz_nB, weight_BD)
            if self.weight_VD is not None:
                _add_product_(self.weight_VD[ids], dz_nV[:, ids].mT, self.side.hidden_ND[tokens])
        if self.bias_V is not None:
            self.bias_V += dz_nV.sum(0, dtype=self.bias_V.dtype)


def _add_product_(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """total += left · right in place, in the dtype of `total`: products of two-byte matrices are not rounded before."""
    if left_MK.dtype == total_MN.dtype:
        total_MN.addmm_(left_MK, right_KN)
    elif left_MK.is_cuda and total_MN.dtype == torch.float32:
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if version >= ADDMM_INTO_FLOAT32:
            torch.addmm(total_MN, left_MK, right_KN, out_dtype=torch.float32, out=total_MN)
        else:  # needs one temporary matrix of the size of the total
            total_MN += torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    else:
        total_MN.addmm_(left_MK.to(total_MN.dtype), right_KN.to(total_MN.dtype))
