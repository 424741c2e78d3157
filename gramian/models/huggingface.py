"""Load Hugging Face causal language models from a local folder: only safetensors, no download, no code from the folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.core.existing_paths import is_file
from gramian.models.gpt import positions_of

CHECKED = 48
"""Tokens of the two documents by which it is seen whether a model keeps documents apart."""


def load_huggingface(
    path: str, fresh: bool, vocabulary: int, length: int, seed: int, field: str = "model.path", isolate: bool = False
) -> nn.Module:
    """Load a Hugging Face causal language model from a folder; returns it in training mode.

    Args:
        path: folder of the model.
        fresh: True: new random weights drawn from `seed`; False: the folder's weights, in float32.
        vocabulary: number of token ids that the model must have at least.
        length: sequence length in tokens that the model's context must allow.
        seed: seed of fresh weights.
        field: name of the config key that errors report.
        isolate: whether the model is to keep packed documents apart, by their positions.

    Raises:
        GramianError: if the folder cannot be loaded, lacks weights, or the vocabulary or the context is too small.
    """
    missing: list[str] = []
    with open_model_folder(path, field) as (shape, causal):
        if fresh:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = causal.from_config(shape)
        else:
            model, report = causal.from_pretrained(
                path, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
            missing = sorted(report["missing_keys"])
    if missing:  # the library draws them without a seed
        raise GramianError(
            f"{field}: {path} has no weights of {missing[0]}{f' and {len(missing) - 1} more' * (len(missing) > 1)}; "
            "expected weights of all parameters"
        )
    if shape.vocab_size < vocabulary:
        raise GramianError(
            f"{field}: its vocabulary of {shape.vocab_size} is smaller than the tokenizer's {vocabulary}; "
            "expected a tokenizer that belongs to the model"
        )
    limit = getattr(shape, "max_position_embeddings", None) or getattr(shape, "n_positions", None)
    if limit is not None and length > limit:
        raise GramianError(f"data.length: expected at most the model's context of {limit}, got {length}")
    _refuse_lookahead(model, min(8, limit or 8), f"{field}: {path}")
    if isolate:
        _refuse_mixing(model, max(4, min(CHECKED, limit or CHECKED)), path)
    found: nn.Module = model
    return found.train()


@torch.no_grad()
def _refuse_lookahead(model: Any, length: int, what: str) -> None:
    """Raise a GramianError if the logits of earlier tokens depend on the last one, as those of an encoder such as BERT do."""
    model.eval()
    tokens = torch.arange(1, length + 1)[None] % model.config.vocab_size
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % model.config.vocab_size
    change = (model(input_ids=tokens, use_cache=False).logits - model(input_ids=other, use_cache=False).logits).abs()
    if float(change[:, :-1].max()) > 1e-3 * float(change[:, -1].max()):
        raise GramianError(
            f"{what} predicts a token from later ones; expected a causal language model (is_decoder in config.json)"
        )


@torch.no_grad()
def _refuse_mixing(model: Any, length: int, path: str) -> None:
    """Raise a GramianError unless two packed documents, told apart by positions, are as alone, and none sees the other."""
    model.eval()
    first = length // 2 - 1
    tokens = torch.arange(1, length + 1)[None] % model.config.vocab_size
    other = torch.cat([(tokens[:, :first] + 3) % model.config.vocab_size, tokens[:, first:]], dim=1)
    positions = positions_of((torch.arange(length) >= first).long()[None])
    why = ""
    try:
        packed, changed = (model(input_ids=t, position_ids=positions, use_cache=False).logits for t in (tokens, other))
        parts = (tokens[:, :first], tokens[:, first:])
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], dim=1)
        size = float(alone.abs().max())
        apart = float((packed - changed)[:, first:].abs().max()) <= 1e-6 * size
        apart = apart and float((packed - alone).abs().max()) <= 1e-4 * size
    except Exception as problem:  # of the model's own code, which may take no positions
        apart, why = False, f": {' '.join(str(problem).split())[:100]}"
    if not apart:
        raise GramianError(
            f"data.isolate: {path} ({type(model).__name__}, attention {model.config._attn_implementation!r}) does not keep "
            f"packed documents apart{why}; expected false, or data.pack = false"
        )


@contextmanager
def open_model_folder(
    path: str, field: str = "model.path", expected: str = "a causal language model in safetensors"
) -> Iterator[tuple[Any, Any]]:
    """Context manager that yields the config of a model folder, and the class `AutoModelForCausalLM` to load it with.

    Inside, transformers shows no progress bars and no warnings, and any exception but out-of-memory becomes a GramianError
    of one line that names the config key `field` and says what was `expected`.

    Raises:
        GramianError: if transformers is not installed, or the folder cannot be read.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise GramianError("model.kind: huggingface needs transformers; expected gramian[hf] installed") from None
    if not is_file(Path(path) / "config.json"):
        raise GramianError(f"{field}: {path} has no config.json; expected the folder of a Hugging Face model")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield AutoConfig.from_pretrained(path, local_files_only=True), AutoModelForCausalLM
    except (GramianError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as problem:  # the library raises many types
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise GramianError(f"{field}: {path} cannot be loaded ({reason}); expected {expected}") from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
