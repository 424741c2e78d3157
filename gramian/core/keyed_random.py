"""Random numbers that depend on the token, not on their place in a stream: any split into batches draws the same numbers.

hash(seed, sample, position, draw) by two rounds of a 64-bit mixer, in integer tensors, so the CPU and every GPU agree.
"""

import torch
from torch import Tensor


def token_keys(seed: int, samples_B: Tensor, tokens: int, draw: int = 0) -> Tensor:
    """A well-mixed non-negative 62-bit integer for each of T tokens of B samples, int64 [B, T], on the device of the ids.

    Args:
        seed: seed of all draws.
        samples_B: sample ids, integers [B]; equal ids give equal numbers.
        tokens: number of tokens T of a sample.
        draw: number of the draw; another draw of the same tokens gives independent numbers.
    """
    position_T = torch.arange(tokens, device=samples_B.device)
    mixed_B = _mix(samples_B.long() * 0x9E3779B1 + _signed(seed * 0x2545F4914F6CDD1D + draw * 0x632BE59BD9B4E019))
    return _mix(mixed_B[:, None] + position_T[None, :] * 0x7FEB352D) & (2**62 - 1)


def token_uniforms(seed: int, samples_B: Tensor, tokens: int, draw: int = 0) -> Tensor:
    """A uniform number in [0, 1) per token, float64 [B, tokens], a function of seed, sample ids [B], position and draw."""
    return (token_keys(seed, samples_B, tokens, draw) >> 9).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of each 64-bit integer by the finaliser of splitmix64; products wrap around, shifts are logical."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    moved: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return moved


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
