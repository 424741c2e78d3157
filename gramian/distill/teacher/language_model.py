"""Read a language model: its final hidden states, residual stream and head, and a hash of its class, config and weights.

Two families can be read: models with a method `hidden(tokens, documents, layers)` and a linear layer `head` (the reference
GPT and Goose), and Hugging Face causal language models.

Legend: B windows, T tokens, D width.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.models.gpt import positions_of
from gramian.parallel.wrap_data_parallel import blocks_of

_NOT_HASHED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures")


def hidden_of(
    model: nn.Module, tokens_BT: Tensor, documents_BT: Tensor | None = None, layers: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run a language model without its head: the input of the head, and the residual stream at some layers.

    Args:
        model: GPT, Goose (or a model with the same `hidden` and `head`), or a Hugging Face causal language model.
        tokens_BT: token ids.
        documents_BT: document of each token, which sees no other (of a Hugging Face model: `load_huggingface` checks it); None:
            one document per window.
        layers: where to read the stream: 0 is the embedding, l is after transformer block l, counted from 1.

    Returns:
        The final hidden state [B, T, D], after the final norm, and {layer: stream [B, T, D]}.

    Raises:
        GramianError: if the model is of neither family, or a layer does not exist.
    """
    if is_native(model):
        check_layers(model, layers)
        hidden_BTD: Tensor
        hidden_BTD, streams = model.hidden(tokens_BT, documents_BT, layers)  # type: ignore[operator]
        return hidden_BTD, streams
    body = body_of(model)
    check_layers(model, layers)
    positions = {} if documents_BT is None else {"position_ids": positions_of(documents_BT)}
    with _streams(blocks_of(body), layers) as streams:
        found = body(input_ids=tokens_BT, use_cache=False, return_dict=True, **positions)
    return found.last_hidden_state, {layer: streams[layer] for layer in layers}


def check_layers(model: nn.Module, layers: Sequence[int]) -> None:
    """Raise a GramianError if a layer does not exist in the model or is named twice, or its blocks cannot be found."""
    if not layers:
        return
    last = len(blocks_of(model))
    if not is_native(model) and last != text_config(model).num_hidden_layers:
        raise GramianError(f"layers: the blocks of {type(model).__name__} are not understood; expected no layers")
    for layer in layers:
        if not 0 <= layer <= last:
            raise GramianError(f"layers: {type(model).__name__} has no layer {layer}; expected 0 to {last}")
    if len(set(layers)) < len(layers):
        raise GramianError(f"layers: {list(layers)} names one twice; expected each once")


@contextmanager
def _streams(blocks: Sequence[nn.Module], layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Context manager whose value becomes {layer: residual stream}, recorded by forward hooks on the transformer blocks.

    Layer 0 is the input of the first block, layer l the output of block l.

    `output_hidden_states` is not used: it stores every layer, returns the last one after the final norm, and finds modules by a
    class that `fully_shard` replaces.
    """
    found: dict[int, Tensor] = {}

    def record_input(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        found[0] = inputs[0] if inputs else named["hidden_states"]

    def record_output(layer: int, output: Any) -> None:
        found[layer] = output if isinstance(output, Tensor) else output[0]

    hooks = [blocks[0].register_forward_pre_hook(record_input, with_kwargs=True)] if 0 in layers else []
    for layer in layers:
        if layer:
            hooks.append(blocks[layer - 1].register_forward_hook(lambda _, __, out, at=layer: record_output(at, out)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def is_native(model: nn.Module) -> bool:
    """True if the model has a method `hidden` and a module `head`, as the reference GPT and Goose do."""
    return callable(getattr(model, "hidden", None)) and isinstance(getattr(model, "head", None), nn.Module)


def body_of(model: nn.Module) -> nn.Module:
    """The part of a Hugging Face model below its head; raises `GramianError` for any other model."""
    body = getattr(model, str(getattr(model, "base_model_prefix", "")) or "base_model", None)
    if not hasattr(model, "get_output_embeddings") or not isinstance(body, nn.Module) or body is model:
        raise GramianError(
            f"teacher: {type(model).__name__} is not understood; expected the reference GPT, Goose or a Hugging Face causal "
            "language model"
        )
    return body


def linear_of(model: nn.Module) -> nn.Linear:
    """The linear layer of a model that computes its logits; raises a GramianError if there is none."""
    if not is_native(model):
        body_of(model)
    found = model.head if is_native(model) else model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(found, nn.Linear):
        raise GramianError(
            f"teacher: the head of {type(model).__name__} is not understood: it is a {type(found).__name__}; expected a "
            "linear layer"
        )
    return found


def text_config(model: nn.Module) -> Any:
    """The config of a Hugging Face model, or of the text part of a multimodal one."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def teacher_hash(model: nn.Module) -> str:
    """Hex hash of a model's class, config and weights: equal hashes mean equal signals for equal tokens and arithmetic.

    Tensors are hashed one at a time; sharded ones are gathered first, which is a collective. Cost: reads every weight once,
    about a second per GB.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):
        settings = {key: value for key, value in config.to_diff_dict().items() if key not in _NOT_HASHED}
    else:
        settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    name = type(model).__name__.removeprefix("FSDP")  # which `fully_shard` puts in front of it
    digest = hashlib.sha256(f"{name}\0".encode())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
        digest.update(f"\0{name.removeprefix('_orig_mod.')}\0{full.dtype}\0{tuple(full.shape)}\0".encode())
        if full.numel():
            digest.update(full.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
