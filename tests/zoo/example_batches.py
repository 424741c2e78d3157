"""Batches for a model of any type: what its forward takes, by the names of its arguments."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.zoo.tiny_configs import VOCABULARY

B, T = 3, 8
Batch = dict[str, Tensor]


def numbers(seed: int, *shape: int) -> Tensor:
    """Float64 numbers from a standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_ids(seed: int, *shape: int, below: int = VOCABULARY - 4) -> Tensor:
    """Tokens that are none of the special ones, which stand at both ends of the vocabulary."""
    return torch.randint(3, max(4, below), shape, generator=torch.Generator().manual_seed(seed))


def option(config: PretrainedConfig, *names: str) -> Any:
    """The value of the first option of this name that is not None, in the configuration or in one inside it; else None."""
    within = [config]
    while within:
        one = within.pop(0)
        found = next((vars(one)[name] for name in names if vars(one).get(name) is not None), None)
        if found is not None:
            return found
        within += [value for value in vars(one).values() if isinstance(value, PretrainedConfig)]
    return None


def batches(model: PreTrainedModel) -> Iterator[tuple[str, Batch]]:
    """(name, batch) of everything that a forward of this model might take, the likeliest first."""
    takes = inspect.signature(model.forward).parameters
    parts = {name: make for name, make in PARTS.items() if any(argument in takes for argument in ARGUMENTS[name])}
    main = next((name for name in parts if model.main_input_name in ARGUMENTS[name]), None)
    orders = [[main]] if main else []
    orders += [[name] for name in parts if name != main]
    orders += [[main or first, name] for first in list(parts)[:1] for name in parts if name != (main or first)]
    orders += [list(parts)] if len(parts) > 2 else []
    for order in orders:
        for variants in _product([list(PARTS[name](model, takes)) for name in order]):
            batch = {key: value for one in variants for key, value in one.items()}
            if batch:
                yield "+".join(order) + ":" + ",".join("x".join(map(str, v.shape[1:])) for v in batch.values()), batch


def _product(lists: list[list[Batch]]) -> Iterator[list[Batch]]:
    if not lists:
        yield []
        return
    for rest in _product(lists[1:]):
        for one in lists[0]:
            yield [one, *rest]


Takes = Any


def _text(model: PreTrainedModel, takes: Takes) -> Iterator[Batch]:
    below = min(option(model.config, "vocab_size") or VOCABULARY, VOCABULARY) - 4
    one: Batch = {"input_ids": token_ids(1, B, T, below=below)} if "input_ids" in takes else {}
    if "inputs" in takes:
        one["inputs"] = token_ids(1, B, T, below=below)
    if one and "attention_mask" in takes:
        one["attention_mask"] = torch.ones(B, T, dtype=torch.long)
    if "bbox" in takes:
        corners = torch.randint(0, 8, (B, T, 4), generator=torch.Generator().manual_seed(6))
        one["bbox"] = corners.cumsum(-1)
    if "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False):
        one["decoder_input_ids"] = token_ids(2, B, T - 2, below=below)
    yield one
    if "input_ids" in one:
        long = option(model.config, "num_codebooks", "n_codebooks", "num_quantizers")
        if isinstance(long, int):
            yield one | {"input_ids": token_ids(1, B, T, long, below=below)}


def _image(model: PreTrainedModel, takes: Takes) -> Iterator[Batch]:
    size = option(model.config, "image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = option(model.config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    frames = option(model.config, "num_frames") or 2
    argument = next(name for name in ARGUMENTS["image"] if name in takes)
    for shape in ((channels, height, width), (frames, channels, height, width), (2, channels, height, width)):
        yield {argument: numbers(3, B, *shape)}
    yield {argument: numbers(3, B, 3, 64, 64)}
    yield {argument: numbers(3, B, 3, 32, 320)}


def _decoded(model: PreTrainedModel, takes: Takes) -> Batch:
    wanted = "decoder_input_ids" in takes and (getattr(model.config, "is_encoder_decoder", False) or "labels" in takes)
    return {"decoder_input_ids": token_ids(2, B, T - 2)} if wanted else {}


def _features(model: PreTrainedModel, takes: Takes) -> Iterator[Batch]:
    bins = option(model.config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel") or 16
    long = 2 * (option(model.config, "max_source_positions") or 32)
    more = _decoded(model, takes)
    for shape in ((bins, long), (long, bins), (1, long, bins), (80, long), (long, 80), (long, 128), (long, 160)):
        one = more | {"input_features": numbers(4, B, *shape)}
        yield one
        for mask in ("attention_mask", "input_features_mask"):
            if mask in takes:
                yield one | {mask: torch.ones(B, long, dtype=torch.long)}


def _waves(model: PreTrainedModel, takes: Takes) -> Iterator[Batch]:
    more = _decoded(model, takes)
    for shape in ((800,), (1, 800), (1920,), (1, 1920), (1, 3840), (32, 16), (1024, 16), (1024, 128), (8000,)):
        yield more | {"input_values": numbers(5, B, *shape)}


def _series(model: PreTrainedModel, takes: Takes) -> Iterator[Batch]:
    long = option(model.config, "context_length") or 32
    channels = option(model.config, "num_input_channels") or 1
    argument = "past_values" if "past_values" in takes else "context"
    for shape in ((long, channels), (long,)):
        yield {argument: numbers(8, B, *shape)}


PARTS = {"text": _text, "image": _image, "features": _features, "waves": _waves, "series": _series}
ARGUMENTS = {
    "text": ("input_ids", "inputs"),
    "image": ("pixel_values", "pixel_values_videos"),
    "features": ("input_features",),
    "waves": ("input_values",),
    "series": ("past_values", "context"),
}
