"""Reference models in plain torch modules, and text generation with any model."""

from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig, generate
from gramian.models.text_generation import generate_text_tokens

__all__ = ["GPT", "GPTConfig", "Goose", "GooseConfig", "generate", "generate_text_tokens"]
