"""Reference models, in plain torch modules."""

from gramian.models.generate import generate_text_tokens
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig, generate

__all__ = ["GPT", "GPTConfig", "Goose", "GooseConfig", "generate", "generate_text_tokens"]
