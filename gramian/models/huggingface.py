"""Hugging Face causal language models from a folder: safetensors alone, nothing from a hub, no code of the folder's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError


def load_huggingface(
    path: str, fresh: bool, vocabulary: int, length: int, seed: int, field: str = "model.path"
) -> nn.Module:
    """A model with the folder's weights, or with new ones.

    Args:
        path: of the folder.
        fresh: draw new weights.
        vocabulary: that it must have at least.
        length: that its context must have at least.
        seed: of new weights.
        field: that named the folder, for errors.

    Raises:
        GramianError: naming the field that does not fit.
    """
    missing: list[str] = []
    with reading(path, field) as (shape, causal):
        if fresh:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = causal.from_config(shape)
        else:
            model, told = causal.from_pretrained(
                path,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
            missing = sorted(told["missing_keys"])
    if missing:  # the library would draw them, without a seed
        raise GramianError(
            f"{field}: {path} has no weights of {missing[0]}{f' and {len(missing) - 1} more' * (len(missing) > 1)}; "
            "expected those of all parameters"
        )
    if shape.vocab_size < vocabulary:
        raise GramianError(
            f"{field}: its vocabulary of {shape.vocab_size} is smaller than the tokenizer's {vocabulary}; "
            "expected a tokenizer that belongs to the model"
        )
    limit = getattr(shape, "max_position_embeddings", None) or getattr(shape, "n_positions", None)
    if limit is not None and length > limit:
        raise GramianError(f"data.length: expected at most the model's context of {limit}, got {length}")
    found: nn.Module = model
    return found.train()


@contextmanager
def reading(
    path: str, field: str = "model.path", expected: str = "a causal language model in safetensors"
) -> Iterator[tuple[Any, Any]]:
    """The folder's config and the library's class to build a model with.

    Inside, the library shows no progress and no warnings, and whatever it raises is one line that says what was `expected`.

    Raises:
        GramianError: naming the field.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise GramianError("model.kind: huggingface needs transformers; expected gramian[hf] installed") from None
    if not (Path(path) / "config.json").is_file():
        raise GramianError(f"{field}: {path} has no config.json; expected the folder of a Hugging Face model")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield AutoConfig.from_pretrained(path, local_files_only=True), AutoModelForCausalLM
    except (GramianError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as problem:  # whatever the library meets in the files
        told = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise GramianError(f"{field}: {path} cannot be loaded ({told}); expected {expected}") from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
