"""The next token, drawn from logits."""

import torch
from torch import Tensor

from gramian.core.errors import GramianError


def draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id [1], on the CPU, where a seed means the same for every device; probabilities are softmax(logits / temperature)."""
    probabilities_V = (logits_V.float() / temperature).softmax(dim=-1).cpu()
    return torch.multinomial(probabilities_V, 1, generator=generator)


def refuse_to_sample(prompt_T: Tensor, length: int, temperature: float) -> None:
    """Refuse what cannot be continued, naming the argument."""
    if prompt_T.dim() != 1 or not prompt_T.numel():
        raise GramianError(f"prompt: got the shape {list(prompt_T.shape)}; accepted: [T] with at least one token")
    if length < 0:
        raise GramianError(f"length: got {length}; accepted: an integer of at least 0")
    if temperature <= 0.0:
        raise GramianError(f"temperature: got {temperature}; accepted: a number above 0")
