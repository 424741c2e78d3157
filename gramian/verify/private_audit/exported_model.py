"""Load the model of a folder that `gramian export` wrote."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from gramian.core.errors import GramianError
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig
from gramian.models.huggingface import open_model_folder

OWN: dict[str, tuple[Any, Any]] = {"GPT": (GPT, GPTConfig), "Goose": (Goose, GooseConfig)}


def load_exported(folder: Path) -> nn.Module:
    """The model of an exported folder: a GPT or Goose of gramian, or a Hugging Face causal language model, in its own dtype.

    Raises:
        GramianError: if the folder holds no model.
    """
    try:
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, config = OWN.get(shape.pop("kind", ""), (None, None))
        if kind is not None:
            model: nn.Module = kind(config(**shape))
            load_model(model, str(folder / "model.safetensors"))
            return model
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, SafetensorError) as problem:
        why = getattr(problem, "strerror", None) or type(problem).__name__
        raise GramianError(
            f"argument TARGET: {folder} holds no model ({why}); expected a run, or an exported model"
        ) from None
    with open_model_folder(str(folder), "argument TARGET") as (_, causal):
        return causal.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype="auto")  # type: ignore[no-any-return]
