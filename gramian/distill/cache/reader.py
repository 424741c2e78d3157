"""Read a teacher's cache: each call copies the stored signal of a batch of windows from disk.

Legend: B windows, T tokens, D width.
"""

import os
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gramian.core.errors import GramianError
from gramian.distill.cache.cache_files import refuse_damage
from gramian.distill.cache.kind_registry import KINDS
from gramian.distill.cache.layout import Column
from gramian.distill.cache.manifest import HEAD, MANIFEST, Manifest, read_manifest, short
from gramian.distill.loss.head import Head
from gramian.distill.teacher.signal import Signal

_Rows = dict[str, Tensor]
Bytes = npt.NDArray[np.uint8]


class Cache:
    """A teacher's signal on disk, read by window number; made by `open_cache`.

    Rows are read from memory maps; with a GPU into page-locked memory, from which they are copied without waiting. Every read
    allocates its own memory, which torch does not reuse before the copies from it are over. Cost of a call:
    `manifest.bytes_per_token` for every token. The first read of a file verifies its SHA-256, at one or two GB per second.
    """

    def __init__(self, folder: Path, manifest: Manifest, head: Head | None) -> None:
        self.folder, self.manifest = folder, manifest
        self._kind, self._layout = KINDS[manifest.identity.kind], manifest.identity.layout
        self._heads: dict[torch.device, Head] = {} if head is None else {head.weight_VD.device: head}
        self._maps: dict[tuple[str, int], Bytes] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: MutableMapping[Tensor, Future[_Rows]] = WeakTensorKeyDictionary()

    @property
    def hash(self) -> str:
        """Hash of the class, config and weights of the teacher that the cache was made from."""
        return self.manifest.identity.teacher

    @property
    def layer_width(self) -> int:
        """Number of channels of the stored layers of the teacher's residual stream."""
        return self.manifest.identity.layer_width

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the stored signal covers."""
        return self.manifest.identity.vocabulary

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose residual stream is stored; 0 is the embedding, l is after transformer block l."""
        return self.manifest.identity.layers

    @property
    def temperatures(self) -> tuple[float, float] | None:
        """The lowest and the highest temperature at which the signal is valid; None: any."""
        limits = self.manifest.identity.facts.get("temperatures")
        return None if limits is None else (limits[0], limits[1])

    def require_temperatures(self, lowest: float, highest: float) -> None:
        """Raise a GramianError unless all temperatures from `lowest` to `highest` are in the range of this cache."""
        known = self.temperatures
        if known is not None and not known[0] <= lowest <= highest <= known[1]:
            raise GramianError(
                f"temperature: {lowest:g} to {highest:g} is wanted, the cache {self.folder} is right from {known[0]:g} to "
                f"{known[1]:g}; expected temperatures in that range, or a cache built for others"
            )

    def __call__(self, batch: Mapping[str, Tensor]) -> Signal:
        """The teacher's signal of the windows in `batch`, on the device of its "tokens", or of "windows" if it has no tokens.

        "windows" [B] are window numbers and should be on the CPU, since a copy from a GPU is waited for. A number outside the
        cache raises a GramianError.
        """
        windows_B = batch["windows"]
        ahead = self._ahead.pop(windows_B, None)
        raw = self._gathered(windows_B) if ahead is None else ahead.result()
        device = batch["tokens"].device if "tokens" in batch else windows_B.device
        return self._signal(raw, len(windows_B), device)

    def upcoming(self, batch: Mapping[str, Tensor]) -> None:
        """Start to read the rows of a later batch in one background thread, which performs one read after another.

        The rows are identified by the tensor object of "windows" and stored until the batch is read or garbage-collected. An
        error of the read is raised when the cache is called with the batch.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher-cache")
        self._ahead[batch["windows"]] = self._thread.submit(self._gathered, batch["windows"])

    def verify(self) -> int:
        """Verify the checksums of all shard files not read yet; returns the number of shard files.

        Raises a GramianError for the first damaged file.
        """
        for shard in range(self._layout.shards):
            for column in self._layout.columns:
                self._map(column, shard)
        return len(self._maps)

    def close(self) -> None:
        """End the background thread that reads ahead, and close the files."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()
        self._maps.clear()

    def _gathered(self, windows_B: Tensor) -> _Rows:
        """Read the rows of these windows as {column: uint8 [B · bytes per row]}, into page-locked memory if there is a GPU."""
        windows = [int(window) for window in windows_B.tolist()]
        for window in windows:
            if not 0 <= window < self._layout.windows:
                raise GramianError(
                    f"windows: the cache {self.folder} has no window {window}; expected 0 to {self._layout.windows - 1}"
                )
        raw = {}
        for column in self._layout.columns:
            stride = self._layout.stride(column)
            rows = torch.empty(len(windows) * stride, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            into = rows.numpy().reshape(len(windows), stride)
            for place, window in enumerate(windows):
                shard, row = divmod(window, self._layout.shard_windows)
                into[place] = self._map(column, shard)[row]
            raw[column.name] = rows
        return raw

    def _map(self, column: Column, shard: int) -> Bytes:
        key = (column.name, shard)
        if key not in self._maps:
            name = self._layout.files(shard)[column.name]
            refuse_damage(self.folder, {name: self.manifest.files[name]}, content=True)
            shape = (len(self._layout.rows(shard)), self._layout.stride(column))
            self._maps[key] = np.memmap(self.folder / name, dtype=np.uint8, mode="r", shape=shape)
        return self._maps[key]

    def _signal(self, raw: _Rows, rows: int, device: torch.device) -> Signal:
        stored = {
            column.name: column.unpack(raw[column.name].to(device, non_blocking=True), rows)
            for column in self._layout.columns
        }
        layers = {layer: stored.pop(f"layer-{layer}") for layer in self.layers}
        head = self._head(device) if self._heads else None
        return self._kind.decode(stored, layers, self.manifest.identity.facts, head)

    def _head(self, device: torch.device) -> Head:
        if device not in self._heads:
            self._heads[device] = next(iter(self._heads.values())).to(device)
        return self._heads[device]


def open_cache(
    folder: str | os.PathLike[str],
    *,
    tokenizer_hash: str | None = None,
    windows_digest: str | None = None,
    teacher_hash: str | None = None,
    vocabulary: int | None = None,
    kind: str | None = None,
    layers: tuple[int, ...] = (),
    verify: Literal["first use", "full"] = "first use",
) -> Cache:
    """Open a complete cache, and check that it was made from the expected data and teacher.

    Checksums of the manifest and the head and sizes of all shards are verified now, checksums of shards at their first use, or
    now with `verify="full"`. Both settings read the whole cache once per process, at the speed of the disk or a GB or two per
    second, since shuffled training reads from every shard in its first steps.

    Args:
        folder: the cache's folder.
        tokenizer_hash: expected hash of the tokenizer; None, here and below: not checked.
        windows_digest: expected hash of the training windows.
        teacher_hash: expected hash of the teacher.
        vocabulary: number of ids that are needed; a cache may have more.
        kind: expected kind, a name of `kind_registry.KINDS`.
        layers: layers of the residual stream that are needed.
        verify: when the checksums of shards are verified.

    Raises:
        GramianError: if the cache is not the expected one, or is damaged; the message names the field or the file.

    Example:
        >>> cache = open_cache("run-teacher", kind="topk")  # doctest: +SKIP
        >>> signal = cache({"windows": torch.tensor([5, 0, 3])})  # doctest: +SKIP
    """
    path = Path(folder)
    manifest = read_manifest(path)
    if manifest is None:
        raise GramianError(f"cache: {path} has no {MANIFEST}; expected a folder written by gramian cache")
    identity = manifest.identity
    if not manifest.complete:
        raise GramianError(f"cache: {path} is not finished; expected gramian cache to run to its end")
    for name, found, wanted in (
        ("kind", identity.kind, kind),
        ("tokenizer", identity.tokenizer, tokenizer_hash),
        ("windows", identity.windows, windows_digest),
        ("teacher", identity.teacher, teacher_hash),
    ):
        if wanted is not None and found != wanted:
            raise GramianError(
                f"{name}: the cache {path} was made with {short(found)}, here it is {short(wanted)}; "
                f"expected the same {name}, or another cache"
            )
    if vocabulary is not None and identity.vocabulary < vocabulary:
        raise GramianError(
            f"vocabulary: the cache {path} knows {identity.vocabulary} ids, {vocabulary} are needed; expected another cache"
        )
    for layer in layers:
        if layer not in identity.layers:
            raise GramianError(
                f"layers: the cache {path} holds {list(identity.layers)}, not {layer}; expected one of them"
            )
    for name, record in manifest.files.items():
        refuse_damage(path, {name: record}, content=name == HEAD)
    cache = Cache(path, manifest, _read_head(path, manifest) if HEAD in manifest.files else None)
    if verify == "full":
        cache.verify()
    return cache


def _read_head(path: Path, manifest: Manifest) -> Head:
    from safetensors.torch import load_file

    tensors = load_file(path / HEAD)
    facts = manifest.identity.facts
    return Head(tensors["weight"], tensors.get("bias"), facts["scale"], facts["softcap"])
