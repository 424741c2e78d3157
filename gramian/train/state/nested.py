"""Split a nested state into flat tensors and JSON values, and merge them again: checkpoints without pickling."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

MARK = "tensor at"
"""Key of the JSON object that stands for a tensor; its value is the tensor's name."""


def split(prefix: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors of nested dicts, lists and tuples into the flat `tensors`, under names "prefix.key.index…".

    Returns:
        The state in JSON values: tensors as {"tensor at": name}, tuples as {"tuple": […]}, dicts with keys that are not text
        as {"pairs": [[key, value], …]}.

    Example:
        >>> tensors = {}
        >>> split("ema", {"decay": 0.9, "sum": torch.zeros(2)}, tensors)  # doctest: +SKIP
        {'decay': 0.9, 'sum': {'tensor at': 'ema.sum'}}
    """
    if isinstance(value, Tensor):
        tensors[prefix] = value
        return {MARK: prefix}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: split(f"{prefix}.{key}", inner, tensors) for key, inner in value.items()}
        return {"pairs": [[key, split(f"{prefix}.{key}", inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [split(f"{prefix}.{i}", inner, tensors) for i, inner in enumerate(value)]}
    if isinstance(value, list):
        return [split(f"{prefix}.{i}", inner, tensors) for i, inner in enumerate(value)]
    return value


def merge(facts: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Rebuild the nested state that `split` took apart from its JSON values; `tensor` returns the tensor of a name."""
    if isinstance(facts, Mapping):
        if set(facts) == {MARK}:
            return tensor(facts[MARK])
        if set(facts) == {"tuple"}:
            return tuple(merge(inner, tensor) for inner in facts["tuple"])
        if set(facts) == {"pairs"}:
            return {key: merge(inner, tensor) for key, inner in facts["pairs"]}
        return {key: merge(inner, tensor) for key, inner in facts.items()}
    return [merge(inner, tensor) for inner in facts] if isinstance(facts, list) else facts
