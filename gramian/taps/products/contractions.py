"""The functions of torch that multiply by a weight, as products y = x W over a sum of axes, with their tokens.

A contraction says how the weight is seen as matrices [in, out], and how x and the gradient of y become tokens a [B, T, in] and
g [B, T, out]: for a convolution a are patches of the input, for a transposed one g are patches of the output's gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tokens = tuple[Tensor, Tensor, Tensor | None]
"""a [B, T, in], g [B, T, out], and a mask [B, T] of the tokens that count, or None."""


@dataclass(frozen=True)
class Contraction:
    """A product of x with a weight."""

    x: Tensor
    weight: Tensor
    weight_matrices: Callable[[Tensor], Iterator[tuple[int | None, Tensor]]]
    """Function that splits a view of the weight into (number of the matrix in a stack, or None; the matrix as [in, out])."""
    tokens: Callable[[Tensor, Tensor, int | None], Tokens]
    """Function of x, the gradient of y, both with samples on a further first axis, and the number of the matrix."""
    lookup: bool = False
    """True if x are indices of rows of the weight."""


def contraction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Contraction | None:
    """The product that a call of a function computes, if its argument number `place` is the weight; None if it is none."""
    if func is F.linear and place == 1:
        return _matrix_product(args[0], args[1], turned=True)
    if func in MATMUL and place in (0, 1) and len(args) == 2 and min(t.dim() for t in args) > 1:
        left, right = args if func is not Tensor.__rmatmul__ else args[::-1]
        right_is_weight = (place == 1) != (func is Tensor.__rmatmul__)
        return _matrix_product(left, right, turned=False) if right_is_weight else _from_left(left, right)
    if func in ADDED and place in (1, 2) and kwargs.get("alpha", 1) == 1:
        return _matrix_product(args[1], args[2], turned=False) if place == 2 else _from_left(args[1], args[2])
    if func is torch.einsum and isinstance(args[0], str) and len(args) == 3 and place in (1, 2):
        return _einsum(args[0], args[3 - place], args[place], place == 1)
    if func is F.embedding and place == 1:
        return _lookup(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("padding_idx"))
    if func is Tensor.__getitem__ and place == 0 and isinstance(args[1], Tensor) and args[1].dtype == torch.long:
        return _lookup(args[1], args[0], None)
    if func in CONVOLUTIONS and place == 1:
        return _convolution(CONVOLUTIONS[func], *args, **kwargs)
    return None


def _rows(t: Tensor) -> Tensor:
    """[B, …, N] as [B, T, N]."""
    return t.reshape(t.shape[0], prod(t.shape[1:-1]), t.shape[-1])


def _one(t: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    """A matrix [K, N] alone, or the matrices of a stack [E, K, N]."""
    if t.dim() == 2:
        yield None, t
    elif t.dim() == 3:
        yield from enumerate(t)


def _matrix_product(x: Tensor, weight: Tensor, turned: bool) -> Contraction:
    """x [.., K] times W [K, N] (`turned`: W [N, K]ᵀ), or x [.., E, M, K] times W [E, K, N]."""

    def tokens(x: Tensor, g: Tensor, e: int | None) -> Tokens:
        if e is None:
            return _rows(x), _rows(g), None
        shared = x.dim() < g.dim() or x.shape[-3] == 1
        x_e = (x if x.dim() < g.dim() else x.select(-3, 0)) if shared else x.select(-3, e)
        g_e = g.select(-3, e)
        return _rows(x_e.expand(*g_e.shape[:-1], x_e.shape[-1])), _rows(g_e), None

    return Contraction(x, weight, lambda t: _one(t.mT if turned else t), tokens)


def _from_left(weight: Tensor, x: Tensor) -> Contraction:
    """W [N, K] times x [.., K, M], or W [E, N, K] times x [.., E, K, M]: the columns of x are tokens."""
    found = _matrix_product(x, weight, turned=True)
    return Contraction(x, weight, found.weight_matrices, lambda x, g, e: found.tokens(x.mT, g.mT, e))


def _einsum(equation: str, x: Tensor, weight: Tensor, weight_first: bool) -> Contraction | None:
    """A product of two tensors over letters that they share and the result lacks; shared ones that it has count a stack."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or "." in equation or len(names) != 2:
        return None
    of_weight, of_x = names if weight_first else names[::-1]
    if any(len(set(letters)) < len(letters) for letters in (of_weight, of_x, out)):
        return None
    stack = [c for c in of_weight if c in of_x and c in out]
    summed = [c for c in of_weight if c in of_x and c not in out]
    kept = [c for c in of_weight if c not in of_x and c in out]
    others = [c for c in of_x if c not in of_weight]
    if len(stack) + len(summed) + len(kept) < len(of_weight) or any(c not in out for c in others) or len(stack) > 1:
        return None

    def matrices(t: Tensor) -> Iterator[tuple[int | None, Tensor]]:
        ordered = t.permute([of_weight.index(c) for c in (*stack, *summed, *kept)])
        shape = [t.shape[of_weight.index(c)] for c in stack]
        widths = [prod(t.shape[of_weight.index(c)] for c in some) for some in (summed, kept)]
        yield from _one(ordered.view(*shape, *widths))

    def tokens(x: Tensor, g: Tensor, e: int | None) -> Tokens:
        found = []
        for t, letters, last in ((x, of_x, summed), (g, out, kept)):
            ordered = t.permute(0, *[1 + letters.index(c) for c in (*stack, *others, *last)])
            ordered = ordered if e is None else ordered[:, e]
            found.append(ordered.reshape(t.shape[0], -1, prod(t.shape[1 + letters.index(c)] for c in last)))
        return found[0], found[1], None

    return Contraction(x, weight, matrices, tokens)


def _lookup(index: Tensor, weight: Tensor, padding: int | None) -> Contraction:
    """Rows of a table [V, D] by index."""
    padding = None if padding is None else padding % weight.shape[0]

    def tokens(x: Tensor, g: Tensor, _: int | None) -> Tokens:
        index_BT = x.reshape(x.shape[0], -1)
        return index_BT, _rows(g), None if padding is None else index_BT != padding

    return Contraction(index, weight, _one, tokens, lookup=True)


def _convolution(
    axes: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *rest: Any,
    **named: Any,
) -> Contraction | None:
    """A convolution over abs(`axes`) axes, transposed if `axes` is negative; None for padding that is given by a word.

    The weight is [O, C/groups, *kernel], or transposed [C, O/groups, *kernel].
    """
    transposed, count = axes < 0, abs(axes)
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = {"stride": stride, "padding": padding, **dict(zip(order, rest, strict=False)), **named}
    stride, padding, dilation = (
        _each(given.get(n, d), count) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    groups, kernel = int(given.get("groups", 1)), weight.shape[2:]
    if isinstance(given["padding"], str) or x.dim() != count + 2:
        return None
    rows = weight.shape[0] // groups

    def matrices(t: Tensor) -> Iterator[tuple[int | None, Tensor]]:
        for number, part in enumerate(t.split(rows)):
            flat = part.view(rows, -1)
            yield number, flat if transposed else flat.mT

    def tokens(x: Tensor, g: Tensor, number: int | None) -> Tokens:
        assert number is not None
        plain, windowed = (x, g) if transposed else (g, x)  # [B, k, channels, *positions]
        plain = plain.chunk(groups, 2)[number].flatten(3).transpose(2, 3)
        samples, images = windowed.shape[:2]
        found = windows(windowed.chunk(groups, 2)[number].flatten(0, 1), kernel, stride, padding, dilation)
        found = found[:, : plain.shape[2]] if transposed else found  # the rest comes from output_padding
        plain, found = plain.flatten(1, 2), found.unflatten(0, (samples, images)).flatten(1, 2)
        return (plain, found, None) if transposed else (found, plain, None)

    return Contraction(x, weight, matrices, tokens)


def windows(
    x: Tensor, kernel: torch.Size, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """The patches [R, positions, channels·kernel size] of images x [R, channels, *axes], padded with zeros."""
    x = F.pad(x, [side for p in reversed(padding) for side in (p, p)]) if any(padding) else x
    for axis, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, (size - 1) * apart + 1, step)[..., ::apart]
    count = len(kernel)
    return x.movedim(1, count + 1).flatten(1, count).flatten(2)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """A number for each axis."""
    if isinstance(value, str):
        return (0,) * count
    return (int(value),) * count if isinstance(value, int) else tuple(int(v) for v in value) * (count // len(value))


MATMUL = (
    torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__,
)  # fmt: skip
ADDED = (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm)
CONVOLUTIONS = {
    F.conv1d: 1, F.conv2d: 2, F.conv3d: 3,
    F.conv_transpose1d: -1, F.conv_transpose2d: -2, F.conv_transpose3d: -3,
}  # fmt: skip
"""{function: number of axes, negative if it is transposed}."""
