r"""The recurrence S_t = d ⊙ S_{t−1} + u_t, computed in parallel over tokens and without division.

Time is cut into chunks of C tokens. First each chunk is computed as if its initial state were 0, giving the local states
Σ_{s ≤ t} d^(t−s) u_s over its own tokens s. carry_n, the true state before chunk n, and the true state of its token j are then

    carry_n = d^C ⊙ carry_{n−1} + (last local state of chunk n−1),      S_t = (local state) + d^(j+1) ⊙ carry_n.

The carries follow the same recurrence, over T/C chunks with the decay d^C, and are computed by recursion. Every factor is a
power of d ≤ 1: nothing overflows and there is no division by an underflowed number, so decays of exactly 0 and 1 are valid.

Backward, for the gradient g of S: λ_t = g_t + d ⊙ λ_{t+1} is the same recurrence in reverse; ∂L/∂u = λ,
∂L/∂d = Σ_t λ_t ⊙ S_{t−1}, ∂L/∂S_0 = d ⊙ λ_1. Only S is saved for it.

Cost: about 2·B·T·D multiply-adds and 8 reads or writes of B·T·D numbers for C = 16, in C·log_C(T) launches; memory a few
times B·T·D. Forward and backward alike.

Legend: B sequences, T tokens, D channels, C tokens of a chunk, N chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError

CHUNK = 16
"""Tokens per chunk of `scan`, C: a compromise between C kernel launches per level of recursion and log_C(T) levels."""


def scan(
    input_BTD: Tensor,
    decay_D: Tensor,
    keep_BT: Tensor | None = None,
    initial_BD: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """All states of the recurrence S_t = d ⊙ k_t S_{t−1} + u_t, in float32, or float64 for float64 inputs.

    Args:
        input_BTD: inputs u.
        decay_D: decays d, from 0 to 1, both included.
        keep_BT: k, 0 where a document begins and the state restarts, else 1; no gradient. None: 1 everywhere.
        initial_BD: state S_0 before the first token; None: 0.
        chunk: number of tokens per chunk, at least 2; it does not change the result, apart from rounding.

    Returns:
        S [B, T, D]; S[:, -1] is the initial state of the next tokens.

    Raises:
        GramianError: if `chunk` is below 2.
    """
    if chunk < 2:
        raise GramianError(f"chunk: got {chunk}; expected an integer of at least 2")
    dtype = wide_dtype(input_BTD, decay_D)
    B, T, D = input_BTD.shape
    initial_BD = input_BTD.new_zeros(B, D) if initial_BD is None else initial_BD
    # Without documents one row of ones, so that there is one code path at no cost.
    keep_BT = input_BTD.new_ones(1, T) if keep_BT is None else keep_BT
    states_BTD: Tensor = _Scan.apply(  # type: ignore[no-untyped-call]
        input_BTD.to(dtype), decay_D.to(dtype), keep_BT.to(dtype), initial_BD.to(dtype), chunk
    )
    return states_BTD


def sequential_scan(
    input_BTD: Tensor, decay_D: Tensor, keep_BT: Tensor | None = None, initial_BD: Tensor | None = None
) -> Tensor:
    """The states S_t = d ⊙ k_t S_{t−1} + u_t, token by token in plain autograd: a reference for `scan`, same arguments."""
    state_BD = torch.zeros_like(input_BTD[:, 0]) if initial_BD is None else initial_BD
    states = []
    for t in range(input_BTD.shape[1]):
        if keep_BT is not None:
            state_BD = keep_BT[:, t, None] * state_BD
        state_BD = decay_D * state_BD + input_BTD[:, t]
        states.append(state_BD)
    return torch.stack(states, dim=1)


class _Scan(torch.autograd.Function):
    """Autograd function of `scan`, which saves only the states; autograd through the chunks would save all intermediates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u_BTD: Tensor, d_D: Tensor, keep_BT: Tensor, initial_BD: Tensor, chunk: int) -> Tensor:
        return _states(u_BTD, d_D * keep_BT.unsqueeze(-1), initial_BD, chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, d_D, keep_BT, initial_BD, ctx.chunk = inputs
        ctx.save_for_backward(output, d_D, keep_BT, initial_BD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, Tensor, None]:
        states_BTD, d_D, keep_BT, initial_BD = ctx.saved_tensors
        # λ_t decays into λ_{t−1} unless token t begins a document: k moves by one token when time runs backwards.
        later_BT = F.pad(keep_BT[:, 1:], (0, 1)).flip(1)
        end_BD = torch.zeros_like(initial_BD)
        backwards_BTD = _Scan.apply(  # type: ignore[no-untyped-call]
            gradients[0].flip(1), d_D, later_BT, end_BD, ctx.chunk
        )
        adjoint_BTD = backwards_BTD.flip(1)
        before_BTD = torch.cat([initial_BD.unsqueeze(1), states_BTD[:, :-1]], dim=1)
        kept_BTD = keep_BT.unsqueeze(-1) * adjoint_BTD
        return adjoint_BTD, (kept_BTD * before_BTD).sum(dim=(0, 1)), None, d_D * kept_BTD[:, 0], None


def _states(u_BTD: Tensor, a_BTD: Tensor, state_BD: Tensor, chunk: int) -> Tensor:
    """All states of S_t = a_t ⊙ S_{t−1} + u_t from the initial `state_BD`, in chunks; `a_BTD` may be [1, T, D] for all B."""
    T = u_BTD.shape[1]
    if chunk >= T:
        states = []
        for u_BD, a_BD in zip(u_BTD.unbind(1), a_BTD.unbind(1), strict=True):
            state_BD = torch.addcmul(u_BD, a_BD, state_BD)
            states.append(state_BD)
        return torch.stack(states, dim=1)
    padding = (0, 0, 0, -T % chunk)
    u_BNCD = F.pad(u_BTD, padding).unflatten(1, (-1, chunk))
    a_BNCD = F.pad(a_BTD, padding).unflatten(1, (-1, chunk))
    alone = [u_BNCD[:, :, 0]]
    for j in range(1, chunk):
        alone.append(torch.addcmul(u_BNCD[:, :, j], a_BNCD[:, :, j], alone[-1]))
    power_BNCD = a_BNCD.cumprod(dim=2)
    ends_BND = _states(alone[-1], power_BNCD[:, :, -1], state_BD, chunk)
    carry_BND = torch.cat([state_BD.unsqueeze(1), ends_BND[:, :-1]], dim=1)
    states_BNCD = torch.addcmul(torch.stack(alone, dim=2), power_BNCD, carry_BND.unsqueeze(2))
    return states_BNCD.flatten(1, 2)[:, :T]
