"""Save factors in a folder, each process its own rows, and load them: safetensors files as `torch.distributed.checkpoint` has.

A matrix of n rows is split over processes by `Exchange.features(n)`, whether its rows are sharded in memory or every process
has all of them, so all processes write equal shares. The header of each file gives the position of its rows in their tensors,
and torch's own safetensors reader finds the rows that a process needs, for any number of processes. Nothing is gathered,
nothing is pickled. `kfac.json` is written last: it has everything that is not a tensor, and the checksum of every file; a
folder without it is not a saved state.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from gramian.core.durable_files import FileRecord, replace_file, replacing
from gramian.core.errors import GramianError
from gramian.curvature.persist import factor_file
from gramian.curvature.state import CurvatureState
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_read import ShardedBox, file_header, first_failure, read_sharded_boxes

INDEX = "kfac.json"
FORMAT = 1
CUT = ("body", "values")
"""Tensors of a factor that have a row for each feature, and are split by rows over the files."""


def _rows(start: int, local: Tensor) -> ShardedBox:
    """Rows `local` of a larger tensor, in which their first row has the index `start`, as a `ShardedBox`."""
    return ShardedBox([start, *[0] * (local.dim() - 1)], local)


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(state: CurvatureState, folder: str, exchange: Exchange | None) -> None:
    """Write a state into a new or empty folder, each process its own rows. Collective; an error on one is raised on all.

    `exchange`: the processes that write; None: this process alone.
    """
    place, rank = _path(folder), 0 if exchange is None else exchange.rank
    _on_all(exchange, lambda: _begin(place) if rank == 0 else None)
    entries = factor_file.state_dict(state, gather=False)
    parts = _rows_to_write(entries, exchange)
    name = f"kfac-{rank:05d}.safetensors"
    checksums = _on_all(exchange, lambda: _write(place / name, {n: rows for n, (rows, _) in parts.items()}))
    body = {
        "format": FORMAT,
        "state": entries,
        "files": {f"kfac-{number:05d}.safetensors": checksum for number, checksum in enumerate(checksums)},
        "tensors": {n: [str(rows.local.dtype).removeprefix("torch."), shape] for n, (rows, shape) in parts.items()},
    }

    def finish() -> None:
        if rank == 0:
            replace_file(place / INDEX, json.dumps({"body": body, "sha256": _digest(body)}).encode())

    _on_all(exchange, finish)


def _begin(place: Path) -> None:
    place.mkdir(exist_ok=True)
    if any(place.iterdir()):
        raise GramianError(f"folder: {str(place)!r} is not empty; expected a new folder, or an empty one")


def _rows_to_write(entries: dict[str, Any], exchange: Exchange | None) -> dict[str, tuple[ShardedBox, list[int]]]:
    """{tensor: (this process's rows, shape of the complete tensor)}; the tensors are removed from `entries`.

    Tensors that are not split by rows are written by the first process, flattened.
    """
    found: dict[str, tuple[ShardedBox, list[int]]] = {}
    first = exchange is None or exchange.rank == 0
    for number, parts in entries["factors"].items():
        n = parts.pop("dim")
        mine = slice(0, n) if exchange is None else exchange.features(n)[exchange.rank]
        for name in [name for name, value in parts.items() if isinstance(value, Tensor)]:
            t = parts.pop(name)
            if name in CUT:
                t = t if len(t) == mine.stop - mine.start and name == "body" else t[mine]
                found[f"{number}.{name}"] = _rows(mine.start, t), [n, *t.shape[1:]]
            else:
                found[f"{number}.{name}"] = _rows(0, t.reshape(-1) if first else t.reshape(-1)[:0]), list(t.shape)
    generator = entries.pop("generator")
    found["generator"] = _rows(0, generator if first else generator[:0]), list(generator.shape)
    return found


def _write(path: Path, parts: Mapping[str, ShardedBox]) -> list[Any]:
    """Write the tensors as one safetensors file and return [its size in bytes, its SHA-256]."""
    from safetensors.torch import save_file

    nonempty = {name: rows for name, rows in parts.items() if len(rows.local)}
    header = file_header({name: rows.offsets for name, rows in nonempty.items()})
    with replacing(path) as temporary:
        save_file({name: rows.local.cpu().contiguous() for name, rows in nonempty.items()}, temporary, header)
    return _checksum(path)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(state: CurvatureState, folder: str, root: nn.Module | None, exchange: Exchange | None) -> None:
    """Replace a state by that of a folder, checked against the model `root` (None: no check). Collective.

    Any number of processes may have written it. With `kfac_distributed_reduce="gram"` each process stores only its rows of
    low-rank sides. A GramianError is raised, and nothing changes, if files are missing or damaged, or factors do not fit.
    """
    place = _path(folder)
    indices: list[dict[str, Any]] = []
    _on_all(exchange, lambda: indices.append(_index(place)))
    body = indices[0]
    names = sorted(body["files"])
    mine = names if exchange is None else names[exchange.rank :: exchange.size]
    _on_all(exchange, lambda: _check(place, {name: body["files"][name] for name in mine}))
    row_exchange = exchange if state.options.kfac_distributed_reduce == "gram" else None
    saved = body["state"]
    tensors = body["tensors"]
    buffers = {name: _buffer(name, dtype, shape, saved, row_exchange) for name, (dtype, shape) in tensors.items()}
    _on_all(exchange, lambda: _read(place, buffers))
    for name, rows in buffers.items():
        number, _, part = name.partition(".")
        t = rows.local.reshape(body["tensors"][name][1]) if part not in CUT else rows.local
        if name == "generator":
            saved["generator"] = t
        else:
            saved["factors"][number][part] = t
            if part == "body" and row_exchange is not None:
                saved["factors"][number]["dim"] = body["tensors"][name][1][0]
    factor_file.load(state, saved, root, row_exchange)


def _buffer(name: str, dtype: str, shape: list[int], saved: Mapping[str, Any], exchange: Exchange | None) -> ShardedBox:
    """Uninitialised memory for the rows of tensor `name` that this process needs: its share under `exchange`, else all.

    `saved` is the state without tensors; `dtype` and `shape` are those of the complete tensor.
    """
    number, _, part = name.partition(".")
    size = shape if part in CUT else [torch.Size(shape).numel()]
    start = 0
    if exchange is not None and part == "body" and saved["factors"][number]["kind"] != "dense":
        mine = exchange.features(shape[0])[exchange.rank]
        start, size = mine.start, [mine.stop - mine.start, *shape[1:]]
    return _rows(start, torch.empty(size, dtype=getattr(torch, dtype)))


def _index(place: Path) -> dict[str, Any]:
    try:
        text = (place / INDEX).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or type(error).__name__
        raise GramianError(
            f"folder: {str(place / INDEX)!r} cannot be read ({what}); expected a folder of kfac.save_sharded"
        ) from None
    try:
        found = json.loads(text)
        body: dict[str, Any] = found["body"]
        intact = found["sha256"] == _digest(body) and body["format"] == FORMAT
        intact = intact and all(isinstance(body[part], dict) for part in ("state", "files", "tensors"))
        intact = intact and all(isinstance(getattr(torch, dtype), torch.dtype) for dtype, _ in body["tensors"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise GramianError(f"folder: {str(place / INDEX)!r} is damaged; expected it as kfac.save_sharded wrote it")
    foreign = sorted({path.name for path in place.glob("*.safetensors")} - body["files"].keys())
    if foreign:  # tensors would be looked for in it, too
        raise GramianError(
            f"folder: {str(place / foreign[0])!r} is not a file of this state; expected its own files alone"
        )
    return body


def _check(place: Path, files: Mapping[str, list[Any]]) -> None:
    for name, expected in files.items():
        try:
            same = _checksum(place / name) == expected
        except OSError as error:
            raise GramianError(
                f"folder: {str(place / name)!r} cannot be read ({error.strerror}); expected every file"
            ) from None
        if not same:
            raise GramianError(f"folder: {str(place / name)!r} is damaged; expected it as kfac.save_sharded wrote it")


def _read(place: Path, buffers: Mapping[str, ShardedBox]) -> None:
    """Fill the buffers from the files of the folder; a GramianError if that fails. Not collective."""
    try:
        read_sharded_boxes(place, {name: rows for name, rows in buffers.items() if rows.local.numel()})
    except CheckpointException as failure:
        reason = first_failure(failure)
        raise GramianError(f"folder: {str(place)!r} cannot be read ({reason}); expected a whole state") from None


def _on_all(exchange: Exchange | None, do: Callable[[], Any]) -> list[Any]:
    """Call `do` on every process and return all results in the order of ranks; the first error is raised on all."""
    result, problem = None, ""
    try:
        result = do()
    except GramianError as error:
        problem = str(error)
    except Exception as error:  # of any kind, such as a full disk: the other processes must not wait for this one
        problem = " ".join(f"folder: {type(error).__name__}: {error}".split()) + "; expected it to be usable"
    reports = [[result, problem]] if exchange is None else exchange.gather_messages([result, problem])
    for rank, (_, problem) in enumerate(reports):
        if problem:
            raise GramianError(problem if exchange is None or rank == 0 else f"process {rank}: {problem}")
    return [given for given, _ in reports]


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise GramianError(f"folder: expected a path, got {folder!r}")
    return Path(folder)


def _checksum(path: Path) -> list[Any]:
    return list(astuple(FileRecord.of(path)))


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
