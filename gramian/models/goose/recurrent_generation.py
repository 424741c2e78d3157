"""Text from a Goose, in memory that does not grow with it."""

import torch
from torch import Tensor

from gramian.models.goose.goose import Goose, State
from gramian.models.token_sampling import draw, refuse_to_sample

PIECE = 256
"""Tokens of the prompt that are read at once."""


@torch.no_grad()
def generate(model: Goose, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Sample a continuation, one step per token; apart from the ids, memory is that of the state, whatever the length.

    Args:
        model: The model; its training mode is restored afterwards.
        prompt_T: Token ids [T], T >= 1.
        length: Number of tokens to add.
        temperature: Divides the logits; above 0.
        seed: Of the draws.

    Returns:
        Token ids [T + length], the prompt first.
    """
    refuse_to_sample(prompt_T, length, temperature)
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        state: State | None = None
        for piece_T in prompt_T.split(PIECE):
            hidden_BTD, state = model.advance(piece_T.unsqueeze(0), state)
        logits_BV = model.head(hidden_BTD[:, -1])
        drawn: list[Tensor] = []
        for _ in range(length):
            drawn.append(draw(logits_BV[0], temperature, generator).to(prompt_T))
            logits_BV, state = model.step(drawn[-1], state)
    finally:
        model.train(was_training)
    return torch.cat([prompt_T, *drawn])
