"""Recurrent layers step by step, in operations that a torch function mode sees; torch's own run inside one function.

Legend: B rows, T steps, I inputs, H state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Function (W_ih x + b_ih, W_hh h + b_hh, states before) → states after, the output first."""


def _lstm(x: Tensor, h: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * before[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    z = (x_z + h_z).sigmoid()
    return ((1 - z) * (x_n + (x_r + h_r).sigmoid() * h_n).tanh() + z * before[0],)


CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda x, h, before: ((x + h).tanh(),),
    torch.rnn_relu: lambda x, h, before: ((x + h).relu(),),
}
"""{function of torch: one step of it}."""


def unrolled(func: Any, *args: Any) -> tuple[Tensor, ...]:
    """The result of `func`, one of `CELLS`, with the same arguments; dropout between layers is `torch.dropout`."""
    x, states, weights, has_biases, layers, p, train, bidirectional, batch_first = args
    begin = [states] if isinstance(states, Tensor) else list(states)
    x_TBI = x.transpose(0, 1) if batch_first else x
    directions, finals = 1 + bidirectional, []
    each = len(weights) // (layers * directions)
    for layer in range(layers):
        x_TBI = torch.dropout(x_TBI, p, train) if layer and p else x_TBI
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = weights[place * each : (place + 1) * each]
            steps = _direction(
                CELLS[func], x_TBI.flip(0) if direction else x_TBI, [s[place] for s in begin], own, has_biases
            )
            outputs.append(torch.stack([step[0] for step in steps[:: -1 if direction else 1]]))
            finals.append(steps[-1])
        x_TBI = torch.cat(outputs, -1)
    ends = [torch.stack(parts) for parts in zip(*finals, strict=True)]
    return (x_TBI.transpose(0, 1) if batch_first else x_TBI), *ends


def _direction(
    cell: Cell, x_TBI: Tensor, begin: list[Tensor], weights: Sequence[Tensor], has_biases: bool
) -> list[tuple[Tensor, ...]]:
    """States after every step of one layer in one direction, the output first."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if has_biases else (None, None)
    rest = weights[4:] if has_biases else weights[2:]
    states, found = tuple(begin), []
    for x_BG in F.linear(x_TBI, w_ih, b_ih):
        states = cell(x_BG, F.linear(states[0], w_hh, b_hh), states)
        if rest:  # a projection of the output
            states = (F.linear(states[0], rest[0]), *states[1:])
        found.append(states)
    return found
