"""Make a batch without rows, for a Poisson draw that has no records."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def without_rows(batch: Any) -> Any:
    """A collated batch with every tensor and array cut to [:0]; tuples, lists, mappings and dataclasses keep their types.

    A list or tuple without any tensor is assumed to have one value per record, and is emptied. A read-only mapping becomes a
    dict. Other values stay as they are.
    """
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, str | bytes):
        return batch
    if isinstance(batch, Mapping):
        emptied = {key: without_rows(value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return emptied
        clone = copy.copy(batch)
        for key, value in emptied.items():
            clone[key] = value
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        settable = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: without_rows(getattr(batch, name)) for name in settable})
    if isinstance(batch, Sequence):
        if not _has_tensors(batch):
            return batch[:0]
        items = [without_rows(value) for value in batch]
        if isinstance(batch, tuple):
            return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
        return items
    return batch


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    if isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping):
        return _has_tensors(list(value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _has_tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
    return isinstance(value, Sequence) and any(map(_has_tensors, value))
