"""Generate text with any of the models: GPT, Goose, or a Hugging Face causal language model."""

from typing import Any

from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.models import goose, gpt
from gramian.models.token_sampling import refuse_to_sample, sample_tokens


def generate_text_tokens(
    model: nn.Module, prompt_T: Tensor, length: int, temperature: float = 1.0, seed: int = 0
) -> Tensor:
    """Sample a continuation of a prompt of token ids; the same seed gives the same tokens.

    Args:
        model: a GPT, a Goose or a Hugging Face causal language model; its training mode is restored afterwards.
        prompt_T: token ids [T], T >= 1, on the model's device.
        length: number of tokens to add.
        temperature: divisor of the logits, above 0.
        seed: seed of the draws.

    Returns:
        Token ids [T + length], the prompt first.

    Example:
        >>> generate_text_tokens(model, torch.tensor([1, 2, 3]), length=20, temperature=0.8)

    Raises:
        GramianError: for any other model, an argument outside its range, or T + length above a Hugging Face model's context.
    """
    refuse_to_sample(prompt_T, length, temperature)
    if isinstance(model, gpt.GPT):
        return gpt.generate(model, prompt_T, length, temperature, seed)
    if isinstance(model, goose.Goose):
        return goose.generate(model, prompt_T, length, temperature, seed)
    if hasattr(model, "get_output_embeddings"):
        return _generate_huggingface(model, prompt_T, length, temperature, seed)
    raise GramianError(f"model: got {type(model).__name__}; expected GPT, Goose or a Hugging Face causal LM")


def _generate_huggingface(model: Any, prompt_T: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """Sample with a Hugging Face model's key-value cache; a model without one recomputes the whole text for every token.

    The library's own `generate` is not used: it would stop at an end-of-text token, apply the sampling options of the folder,
    and draw from the global generator.

    Raises:
        GramianError: if prompt and continuation exceed the model's context.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(prompt_T) + length > limit:
        raise GramianError(
            f"length: got {length} after a prompt of {len(prompt_T)}; expected at most {limit} tokens in all"
        )
    cache = None

    def next_logits(tokens_T: Tensor) -> Tensor:
        nonlocal cache
        unread_T = tokens_T if cache is None else tokens_T[-1:]
        found = model(input_ids=unread_T.unsqueeze(0), past_key_values=cache, use_cache=True)
        cache = getattr(found, "past_key_values", None)
        logits_V: Tensor = found.logits[0, -1]
        return logits_V

    return sample_tokens(model, prompt_T, length, temperature, seed, next_logits)
