"""Sampling of a text token by token, shared by all models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError


def sample_tokens(
    model: nn.Module,
    prompt_T: Tensor,
    length: int,
    temperature: float,
    seed: int,
    next_logits: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sample `length` tokens after a prompt [T], one by one, with the model in evaluation mode; returns ids [T + length].

    Args:
        model: the model, whose training mode is restored afterwards.
        prompt_T: token ids, at least one.
        length: number of tokens to add.
        temperature: divisor of the logits, above 0.
        seed: seed of the draws.
        next_logits: function from all token ids so far to the logits [V] of the next one.

    Raises:
        GramianError: for an argument outside its range.
    """
    refuse_to_sample(prompt_T, length, temperature)
    generator, tokens_T = torch.Generator().manual_seed(seed), prompt_T
    with evaluation_mode(model):
        for _ in range(length):
            tokens_T = torch.cat([tokens_T, _draw(next_logits(tokens_T), temperature, generator).to(tokens_T)])
    return tokens_T


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw one token id [1] with probabilities softmax(logits / temperature), on the CPU for the same draws on any device."""
    probabilities_V = (logits_V.float() / temperature).softmax(dim=-1).cpu()
    return torch.multinomial(probabilities_V, 1, generator=generator)


def refuse_to_sample(prompt_T: Tensor, length: int, temperature: float) -> None:
    """Raise a GramianError unless the prompt is [T] with T ≥ 1, the length is at least 0 and the temperature above 0."""
    if prompt_T.dim() != 1 or not prompt_T.numel():
        raise GramianError(f"prompt: got the shape {list(prompt_T.shape)}; expected [T] with at least one token")
    if length < 0:
        raise GramianError(f"length: got {length}; expected an integer of at least 0")
    if temperature <= 0.0:
        raise GramianError(f"temperature: got {temperature}; expected a number above 0")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients; the training mode of every module is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
