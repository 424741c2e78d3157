"""The files of a cache: one per column (stored quantity) and shard (run of windows), with a row of fixed size per window.

    shards/00012.hidden     rows of windows 12·S … 13·S - 1 (S windows a shard), row-major [window, token, …], little-endian
    shards/00012.json       sizes, checksums and measured errors of that shard's files

Legend: T tokens of a window.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gramian.core.errors import GramianError

SHARD_BYTES, SHARD_TOKENS = 1 << 28, 1 << 20
"""Maximum bytes and tokens of a shard; a killed build may lose one shard per process."""
_TORCH = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "uint16": 2, "uint8": 1}
# Unsigned integers are read as signed ones and masked: torch has few kernels for unsigned types.
_SIGNED = {"uint32": torch.int32, "uint16": torch.int16}


@dataclass(frozen=True)
class Column:
    """A quantity that is stored for every token: `width` numbers of one dtype."""

    name: str
    dtype: str
    """Stored dtype: "float64", "float32", "float16", "bfloat16", "uint32", "uint16" or "uint8"."""
    width: int
    """Number of values per token."""

    @property
    def bytes(self) -> int:
        """Bytes of this column per token."""
        return _SIZES[self.dtype] * self.width

    def pack(self, values: Tensor) -> memoryview:
        """Convert values [..., width] to bytes of the file; raises a GramianError if one is not finite in the stored dtype."""
        if self.dtype in _TORCH:
            stored = values.to(_TORCH[self.dtype])
            if not bool(stored.isfinite().all()):
                raise GramianError(
                    f"cache: {self.name} is not finite in {self.dtype}; expected a teacher without NaN, or dtype bf16 or fp32"
                )
            return stored.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        return np.ascontiguousarray(values.cpu().numpy().astype(np.dtype(self.dtype).newbyteorder("<"))).data.cast("B")

    def unpack(self, raw: Tensor, rows: int) -> Tensor:
        """Convert bytes of a file to values [rows, T, width]: floats in the stored dtype, integers as int64."""
        if self.dtype in _TORCH:
            return raw.view(_TORCH[self.dtype]).view(rows, -1, self.width)
        if self.dtype in _SIGNED:
            raw = raw.view(_SIGNED[self.dtype])
        found: Tensor = raw.view(rows, -1, self.width).long() & (2 ** (8 * _SIZES[self.dtype]) - 1)
        return found


@dataclass(frozen=True)
class CacheLayout:
    """The columns, windows and shards of a cache, and the names of its files."""

    columns: tuple[Column, ...]
    windows: int
    length: int
    """Number of tokens T per window."""
    shard_windows: int

    @property
    def shards(self) -> int:
        """Number of shards of the cache."""
        return math.ceil(self.windows / self.shard_windows)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that all columns together store per token."""
        return sum(column.bytes for column in self.columns)

    def rows(self, shard: int) -> range:
        """Numbers of the windows that shard number `shard` stores."""
        return range(shard * self.shard_windows, min(self.windows, (shard + 1) * self.shard_windows))

    def stride(self, column: Column) -> int:
        """Bytes of one window in the file of a column."""
        return column.bytes * self.length

    def shard_bytes(self, shard: int) -> int:
        """Bytes of all files of a shard, without its record."""
        return len(self.rows(shard)) * self.bytes_per_token * self.length

    def files(self, shard: int) -> dict[str, str]:
        """{column name: path inside the cache} of the files of shard number `shard`."""
        return {column.name: f"shards/{shard:05d}.{column.name}" for column in self.columns}

    def record(self, shard: int) -> str:
        """Path inside the cache of the JSON file with sizes, checksums and errors of shard number `shard`."""
        return f"shards/{shard:05d}.json"


def shard_windows_for(layout: CacheLayout) -> int:
    """Windows per shard: at most 256 MiB and 2²⁰ tokens, at least one window. Depends on columns and window length alone."""
    return max(1, min(SHARD_BYTES // (layout.bytes_per_token * layout.length), SHARD_TOKENS // layout.length))


def id_type(vocabulary: int) -> str:
    """The dtype in which token ids are stored: "uint16" if every id below `vocabulary` fits, else "uint32"."""
    return "uint16" if vocabulary <= 2**16 else "uint32"
