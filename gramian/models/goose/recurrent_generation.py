"""Generate text with a Goose, whose recurrent state has the same size for any length of the text."""

from torch import Tensor

from gramian.models.goose.goose import Goose, State
from gramian.models.token_sampling import sample_tokens

PIECE = 256
"""Number of tokens of the prompt that are processed in one forward pass."""


def generate(model: Goose, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Sample `length` tokens after a prompt of token ids [T]; returns prompt and continuation, [T + length].

    Each token takes one recurrent step; memory, apart from the ids, does not depend on the length. `temperature` > 0 divides
    the logits; the same `seed` gives the same tokens.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), length=20, temperature=0.8)

    Raises:
        GramianError: for an empty prompt, a negative length, or a temperature that is not above 0.
    """
    state: State | None = None
    read = 0

    def next_logits(tokens_T: Tensor) -> Tensor:
        nonlocal state, read
        for piece_T in tokens_T[read:].split(PIECE):
            hidden_BTD, state = model.advance(piece_T.unsqueeze(0), state)
        read = len(tokens_T)
        logits_BV: Tensor = model.head(hidden_BTD[:, -1])
        return logits_BV[0]

    return sample_tokens(model, prompt_T, length, temperature, seed, next_logits)
