"""Random numbers that belong to a token, not to a place in a stream: the same for any split of the data.

hash(seed, sample, position, draw) by two rounds of a 64-bit mixer, in integer tensors, so the CPU and every GPU agree.
"""

import torch
from torch import Tensor


def token_keys(seed: int, samples_B: Tensor, tokens: int, draw: int = 0) -> Tensor:
    """A well-mixed non-negative 62-bit integer for every token [B, T], on the device of the ids.

    Args:
        seed: of all draws.
        samples_B: sample ids.
        tokens: T.
        draw: number of the draw.
    """
    position_T = torch.arange(tokens, device=samples_B.device)
    mixed_B = _mix(samples_B.long() * 0x9E3779B1 + _signed(seed * 0x2545F4914F6CDD1D + draw * 0x632BE59BD9B4E019))
    return _mix(mixed_B[:, None] + position_T[None, :] * 0x7FEB352D) & (2**62 - 1)


def token_uniforms(seed: int, samples_B: Tensor, tokens: int, draw: int = 0) -> Tensor:
    """A number in [0, 1) for every token, [B, T], float64."""
    return (token_keys(seed, samples_B, tokens, draw) >> 9).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; products wrap around, shifts are logical."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    moved: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return moved


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
