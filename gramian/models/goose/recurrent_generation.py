"""Generate text with a Goose in constant memory."""

import torch
from torch import Tensor

from gramian.models.goose.goose import Goose, State
from gramian.models.token_sampling import draw, evaluation_mode, refuse_to_sample

PIECE = 256
"""Tokens of the prompt that are read in parallel."""


def generate(model: Goose, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Sample a continuation, one step per token; apart from the ids, memory does not depend on the length.

    Args:
        model: the model; its training mode is restored afterwards.
        prompt_T: token ids [T], T >= 1.
        length: number of tokens to add.
        temperature: divisor of the logits, above 0.
        seed: seed of the draws.

    Returns:
        Token ids [T + length], the prompt first.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), length=20, temperature=0.8)
    """
    refuse_to_sample(prompt_T, length, temperature)
    generator = torch.Generator().manual_seed(seed)
    state: State | None = None
    drawn: list[Tensor] = []
    with evaluation_mode(model):
        for piece_T in prompt_T.split(PIECE):
            hidden_BTD, state = model.advance(piece_T.unsqueeze(0), state)
        logits_BV = model.head(hidden_BTD[:, -1])
        for _ in range(length):
            drawn.append(draw(logits_BV[0], temperature, generator).to(prompt_T))
            logits_BV, state = model.step(drawn[-1], state)
    return torch.cat([prompt_T, *drawn])
