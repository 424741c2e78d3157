"""A fingerprint of a data set, by which processes and resumed runs notice that they read other data."""

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def dataset_fingerprint(dataset: Any) -> tuple[int, int]:
    """(length, 63-bit digest of the first, the middle and the last record) of a data set with a length and indices.

    A record that reads differently twice, by random augmentation, does not enter the digest. The digest depends on private
    records: it is for comparing ranks, and for the checkpoint, which is as secret as the records.
    """
    size = len(dataset)
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    for index in sorted({0, size // 2, size - 1}) if size else ():
        with preserved_generators():
            once, again = _digest(dataset[index]), _digest(dataset[index])
        digest.update(once if once == again else b"random")
    return size, int.from_bytes(digest.digest(), "little") >> 1


def _digest(record: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, record)
    return digest.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    """Feed type, shape and content of a record, part by part, to the update function of a hash."""
    update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        update(f"{value.dtype}{list(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _feed(update, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(update, part)
    else:
        try:
            update(pickle.dumps(value, protocol=4))
        except Exception:  # whatever cannot be pickled counts by its type alone
            update(b"?")


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Context manager that restores the global random states of torch (CPU), numpy and Python afterwards."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
