"""Text from any of the models: GPT, Goose, or a causal language model of Hugging Face."""

from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.models import goose, gpt
from gramian.models.token_sampling import draw, refuse_to_sample


def generate_text_tokens(
    model: nn.Module, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0
) -> Tensor:
    """Sample a continuation; the same seed gives the same text.

    Args:
        model: Of any kind; its training mode is restored afterwards.
        prompt_T: Token ids [T], T >= 1, on the model's device.
        length: Number of tokens to add.
        temperature: Divides the logits; above 0.
        seed: Of the draws.

    Returns:
        Token ids [T + length], the prompt first.

    Raises:
        GramianError: for another kind of model, or a text longer than a Hugging Face model's context.
    """
    refuse_to_sample(prompt_T, length, temperature)
    if isinstance(model, gpt.GPT):
        return gpt.generate(model, prompt_T, length, temperature, seed)
    if isinstance(model, goose.Goose):
        return goose.generate(model, prompt_T, length, temperature, seed)
    if hasattr(model, "get_output_embeddings"):
        return _generate_huggingface(model, prompt_T, length, temperature, seed)
    raise GramianError(f"model: got {type(model).__name__}; accepted: GPT, Goose or a Hugging Face causal LM")


@torch.no_grad()
def _generate_huggingface(model: Any, prompt_T: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """One step per token with the model's cache of keys and values; one that has none reads the text again for every token.

    Its own `generate` would end at an end-of-text token, mix in the sampling options of its folder, and draw from the global
    generator.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(prompt_T) + length > limit:
        raise GramianError(
            f"length: got {length} after a prompt of {len(prompt_T)}; accepted: at most {limit} tokens in all"
        )
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        tokens_T, unread_T, cache = prompt_T, prompt_T, None
        for _ in range(length):
            found = model(input_ids=unread_T.unsqueeze(0), past_key_values=cache, use_cache=True)
            cache = getattr(found, "past_key_values", None)
            drawn_T = draw(found.logits[0, -1], temperature, generator).to(tokens_T)
            tokens_T = torch.cat([tokens_T, drawn_T])
            unread_T = tokens_T if cache is None else drawn_T
    finally:
        model.train(was_training)
    return tokens_T
