"""Reference models, in plain torch modules."""

from gramian.models.gpt import GPT, GPTConfig, generate

__all__ = ["GPT", "GPTConfig", "generate"]
