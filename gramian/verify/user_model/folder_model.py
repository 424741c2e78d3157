"""A Hugging Face model folder of any architecture, and a small batch that its forward takes, for `gramian doctor --model`.

Only safetensors are read; nothing is downloaded and no code of the folder is run. Legend: B samples, T tokens or frames.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramian.analysis.model_folder import MODEL, causal_windows, load_tokenizer, text_ids
from gramian.analysis.subject import evenly_spaced
from gramian.core.errors import GramianError
from gramian.models.huggingface import open_model_folder

SAMPLES, TOKENS, SIGNAL = 3, 16, 4000
"""Samples of the batch, tokens of a text, and values of a sound wave."""


def load_model(path: str) -> nn.Module:
    """Load a folder's weights in float32 into the architecture that its config names; returns the model in training mode.

    Raises:
        GramianError: if the folder has no config, no safetensors, or an architecture that transformers does not have.
    """
    with open_model_folder(path, MODEL, "a model in safetensors") as (config, _):
        import transformers

        name = (config.architectures or ["AutoModel"])[0]
        kind = getattr(transformers, name, None)
        if kind is None:
            raise GramianError(
                f"{MODEL}: {path} is a {name}, which transformers does not have; expected one that it has"
            )
        model: nn.Module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    return model.train()


def make_batch(model: Any, path: str, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Make keyword arguments of a model's forward from its config: token ids, pixels, a sound wave or its features.

    Args:
        model: a model of transformers.
        path: its folder, for the tokenizer.
        texts: text files, the windows of which are the token ids; none: ids are drawn.

    Raises:
        GramianError: if there are texts and the model takes none, or its inputs are of an unknown kind.
    """
    config, draw = model.config, torch.Generator().manual_seed(0)
    takes, main = {*inspect.signature(model.forward).parameters}, model.main_input_name
    text = _sub(config, "text_config", "encoder") if main == "input_ids" else _sub(config, "decoder", "text_config")
    batch: dict[str, Any] = {}
    if main == "input_ids":
        batch["input_ids"] = _windows(path, texts, text) if texts else _ids(text, draw)
    elif texts:
        raise GramianError(f"argument --text: the model takes {main}; expected no --text")
    else:
        batch[main] = _signal(main, _sub(config, "vision_config", "audio_config", "encoder"), draw)
    if main == "input_ids" and "pixel_values" in takes and not getattr(model, "can_generate", lambda: False)():
        batch["pixel_values"] = _signal("pixel_values", _sub(config, "vision_config"), draw)  # CLIP and its like
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _ids(_sub(config, "decoder"), draw)
    return batch | ({"use_cache": False} if "use_cache" in takes else {})


def _sub(config: Any, *names: str) -> Any:
    """The first of these parts of a config that it has, else the config itself."""
    return next((part for name in names if hasattr(part := getattr(config, name, None), "to_dict")), config)


def _length(config: Any) -> int:
    limits = (
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    )
    return min([TOKENS, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _ids(config: Any, draw: torch.Generator) -> Tensor:
    """Token ids [B, T], drawn from those that the config gives no meaning of its own (padding, end of text, images)."""
    special = {id_ for name, id_ in config.to_dict().items() if name.endswith("token_id") and isinstance(id_, int)}
    plain = [id_ for id_ in range(min(config.vocab_size, 1000)) if id_ not in special]
    return torch.tensor(plain)[torch.randint(len(plain), (SAMPLES, _length(config)), generator=draw)]


def _windows(path: str, texts: Sequence[str], config: Any) -> Tensor:
    """Token ids [B, T] of windows that are evenly spaced over text files."""
    ids_N, _ = text_ids(load_tokenizer(path), texts, ends=False)
    windows_WT = causal_windows(ids_N, min(_length(config), max(1, len(ids_N) // SAMPLES)) - 1)
    chosen_BT = windows_WT[torch.from_numpy(evenly_spaced(len(windows_WT), SAMPLES))]
    if len(chosen_BT.unique(dim=0)) < 2:
        raise GramianError(f"argument --text: {len(ids_N)} tokens make no two different windows; expected more text")
    return chosen_BT


def _signal(name: str, config: Any, draw: torch.Generator) -> Tensor:
    """Normal numbers as pixels [B, C, H, W], a sound wave [B, T] or its features [B, bins, T] or [B, T, bins]."""

    def size(*names: str, default: int) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)

    bins, frames = size("num_mel_bins", "input_feat_per_channel", default=80), size("max_length", default=64)
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        shape: tuple[int, ...] = (size("num_channels", default=3), *sides)
    elif name == "input_values":
        shape = (frames, bins) if hasattr(config, "num_mel_bins") else (SIGNAL,)
    elif name == "input_features":
        places = getattr(config, "max_source_positions", None)
        shape = (bins, 2 * places) if hasattr(config, "num_mel_bins") and places else (frames, bins)
    else:
        raise GramianError(
            f"{MODEL}: its forward takes {name}; expected input_ids, pixel_values, input_values, input_features"
        )
    return torch.randn(SAMPLES, *shape, generator=draw)
