"""Every layer of `torch.nn` that has parameters, found there and built by rules: plain, and with each option of `VARIANTS`."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.example_batches import B, Batch, numbers

WIDTH, LENGTH = 8, 6
ARGUMENTS: dict[str, Any] = {
    "in_features": WIDTH, "in1_features": WIDTH, "in2_features": WIDTH, "out_features": 5, "in_channels": WIDTH,
    "out_channels": WIDTH, "kernel_size": 3, "num_embeddings": 12, "embedding_dim": 5, "input_size": WIDTH, "hidden_size": 5,
    "num_features": WIDTH, "num_channels": WIDTH, "num_groups": 2, "normalized_shape": WIDTH, "num_parameters": WIDTH,
    "d_model": WIDTH, "nhead": 2, "dim_feedforward": 12, "embed_dim": WIDTH, "num_heads": 2, "num_encoder_layers": 1,
    "num_decoder_layers": 1, "num_layers": 1, "n_classes": 12, "num_classes": 12, "reduction": "none", "cutoffs": [4, 8],
    "dropout": 0.0, "affine": True, "batch_first": True,
}  # fmt: skip
"""Arguments of constructors by name; a layer that stacks another one gets it as well."""
VARIANTS: dict[str, Any] = {
    "groups": 4, "stride": 2, "dilation": 2, "padding_mode": "circular", "bias": False, "bidirectional": True,
    "proj_size": 3, "num_layers": 2, "norm_first": True, "padding_idx": 3, "mode": "max", "scale_grad_by_freq": True,
    "add_bias_kv": True, "kdim": WIDTH, "div_value": 2.0, "track_running_stats": True,
}  # fmt: skip


def layers() -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """{name of the row: (class, arguments)} of every class of `torch.nn` with a forward, and parameters once it has run."""
    found = {}
    for name, kind in vars(nn).items():
        if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind.forward is nn.Module.forward:
            continue
        takes = dict(inspect.signature(kind).parameters)
        if "args" in takes:  # what it takes is written down in its base
            takes = {key: value for key, value in inspect.signature(kind.__base__).parameters.items() if key != "mode"}
        given = {key: value for key, value in ARGUMENTS.items() if key in takes}
        given |= {key: make() for key, make in STACKED.items() if key in takes}
        options = [{}, *({key: value} for key, value in VARIANTS.items() if key in takes and "Lazy" not in name)]
        for option in options:
            if _has_parameters(kind, given | option):
                title = "".join(f" {key}={value}" for key, value in option.items())
                found[f"nn.{name}{title}"] = kind, {**given, **option}
    return found


STACKED = {
    "encoder_layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True),
    "decoder_layer": lambda: nn.TransformerDecoderLayer(WIDTH, 2, 12, 0.0, batch_first=True),
}


def _has_parameters(kind: type[nn.Module], given: dict[str, Any]) -> bool:
    try:
        return next(kind(**given).parameters(), None) is not None
    except (TypeError, ValueError):  # of a container, a loss or a pooling, which want more
        return False


def layer_batches(layer: nn.Module) -> Iterator[tuple[str, Batch]]:
    """(name, batch) of what a layer may take: tokens of width 8, pictures of 8 channels, numbers of rows in a table."""
    name = type(layer).__name__
    takes = inspect.signature(layer.forward).parameters.values()
    wanted = [one.name for one in takes if one.default is one.empty]
    axes = next((int(digit) for digit in "123" if f"{digit}d" in name), 0)
    shapes = [(LENGTH, WIDTH), (WIDTH, LENGTH)] if not axes else [(WIDTH, *[LENGTH] * axes)]
    if "Cell" in name or "target" in wanted[-1]:
        shapes = [(WIDTH,)]
    for shape in shapes:
        yield "floats:" + "x".join(map(str, shape)), {one: _given(one, shape, seed) for seed, one in enumerate(wanted)}
    yield "rows", {one: torch.randint(12, (B, LENGTH), generator=torch.Generator().manual_seed(1)) for one in wanted}


def _given(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.arange(B) * 4 if "target" in name else numbers(30 + seed, B, *shape)
