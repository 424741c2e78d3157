"""Sampling of the next token from logits, shared by all models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError


def draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw one id [1] with probabilities softmax(logits / temperature), on the CPU, so that a seed is device-independent."""
    probabilities_V = (logits_V.float() / temperature).softmax(dim=-1).cpu()
    return torch.multinomial(probabilities_V, 1, generator=generator)


def refuse_to_sample(prompt_T: Tensor, length: int, temperature: float) -> None:
    """Refuse arguments of a generation that cannot be continued, naming the argument."""
    if prompt_T.dim() != 1 or not prompt_T.numel():
        raise GramianError(f"prompt: got the shape {list(prompt_T.shape)}; expected [T] with at least one token")
    if length < 0:
        raise GramianError(f"length: got {length}; expected an integer of at least 0")
    if temperature <= 0.0:
        raise GramianError(f"temperature: got {temperature}; expected a number above 0")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and restore its training mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
