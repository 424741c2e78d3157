"""Reference language models (GPT, Goose) in plain torch modules, and text generation with them or Hugging Face models."""

from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig, generate
from gramian.models.text_generation import generate_text_tokens

__all__ = ["GPT", "GPTConfig", "Goose", "GooseConfig", "generate", "generate_text_tokens"]
