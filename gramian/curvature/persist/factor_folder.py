"""Factors in a folder, every process writing its rows: safetensors files as `torch.distributed.checkpoint` lays them out.

A matrix of n rows is cut as `Exchange.features(n)` says, whether its rows are spread in memory or whole on every process, so
all write alike. Each file says in its header where in their tensors its rows begin, and torch's own safetensors reader finds
what a process needs, for any number of processes. Nothing is gathered, nothing is pickled. `kfac.json` is written last: a
folder without it is no state; it holds everything that is no tensor, and the checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from gramian.core.errors import GramianError
from gramian.curvature.persist import factor_file
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_read import ShardedBox, first_failure, read_boxes

if TYPE_CHECKING:
    from gramian.curvature.kfac import KFACNaturalGradient

INDEX = "kfac.json"
FORMAT = 1
CUT = ("body", "values")
"""Parts of a factor with a row for each feature."""


@dataclass(frozen=True)
class FolderRows:
    """Rows of a tensor, from `start` on."""

    start: int
    local: Tensor

    @property
    def box(self) -> ShardedBox:
        """Where they lie in it."""
        return ShardedBox([self.start, *[0] * (self.local.dim() - 1)], self.local)


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(kfac: KFACNaturalGradient, folder: str, others: Exchange | None) -> None:
    """Write; all processes, in the same folder. Collective.

    Raises:
        GramianError: on all processes, if one of them cannot write.
    """
    place, rank = _path(folder), 0 if others is None else others.rank
    _together(others, lambda: _begin(place) if rank == 0 else None)
    whole = factor_file.state_of(kfac, gather=False)
    parts = _taken_out(whole, others)
    name = f"kfac-{rank:05d}.safetensors"
    written = _together(others, lambda: _write(place / name, {n: rows for n, (rows, _) in parts.items()}))
    files = {f"kfac-{number:05d}.safetensors": told for number, told in enumerate(written)}
    body = {
        "format": FORMAT,
        "state": whole,
        "files": files,
        "tensors": {n: [str(rows.local.dtype).removeprefix("torch."), shape] for n, (rows, shape) in parts.items()},
    }
    _together(others, lambda: _finish(place, body) if rank == 0 else None)


def _begin(place: Path) -> None:
    place.mkdir(exist_ok=True)
    if any(place.iterdir()):
        raise GramianError(f"folder: {str(place)!r} is not empty; expected a new folder, or an empty one")


def _taken_out(whole: dict[str, Any], others: Exchange | None) -> dict[str, tuple[FolderRows, list[int]]]:
    """{tensor: this process's rows and the shape of all}, out of a state. What is not cut is the first process's."""
    found: dict[str, tuple[FolderRows, list[int]]] = {}
    first = others is None or others.rank == 0
    for number, parts in whole["factors"].items():
        n = parts.pop("dim")
        mine = slice(0, n) if others is None else others.features(n)[others.rank]
        for name in [name for name, value in parts.items() if isinstance(value, Tensor)]:
            t = parts.pop(name)
            if name in CUT:
                t = t if len(t) == mine.stop - mine.start and name == "body" else t[mine]
                found[f"{number}.{name}"] = FolderRows(mine.start, t), [n, *t.shape[1:]]
            else:
                found[f"{number}.{name}"] = FolderRows(0, t.reshape(-1) if first else t.reshape(-1)[:0]), list(t.shape)
    generator = whole.pop("generator")
    found["generator"] = FolderRows(0, generator if first else generator[:0]), list(generator.shape)
    return found


def _write(path: Path, parts: Mapping[str, FolderRows]) -> list[Any]:
    """[bytes, SHA-256] of the file."""
    from safetensors.torch import save_file

    held = {name: rows for name, rows in parts.items() if len(rows.local)}
    begins = {name: {"saved_offsets": rows.box.offsets} for name, rows in held.items()}
    header = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: rows.local.cpu().contiguous() for name, rows in held.items()}, path, header)
    return _checksum(path)


def _finish(place: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps({"body": body, "sha256": _digest(body)})
    with (place / f"{INDEX}.part").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    (place / f"{INDEX}.part").rename(place / INDEX)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(kfac: KFACNaturalGradient, folder: str, root: nn.Module | None, others: Exchange | None) -> None:
    """Read what any number of processes wrote. Collective; nothing changes if something does not fit.

    Args:
        kfac: gets it.
        folder: that `save` wrote.
        root: the model, if it is known.
        others: the processes that read; with `"gram"` each keeps its rows of low-rank sides.

    Raises:
        GramianError: on all processes, naming what is wrong.
    """
    place = _path(folder)
    indices: list[dict[str, Any]] = []
    _together(others, lambda: indices.append(_index(place)))
    body = indices[0]
    names = sorted(body["files"])
    mine = names if others is None else names[others.rank :: others.size]
    _together(others, lambda: _check(place, {name: body["files"][name] for name in mine}))
    spread = others if kfac.options.kfac_distributed_reduce == "gram" else None
    saved = body["state"]
    wanted = {name: _wanted(name, dtype, shape, saved, spread) for name, (dtype, shape) in body["tensors"].items()}
    _together(others, lambda: _read(place, wanted))
    for name, rows in wanted.items():
        number, _, part = name.partition(".")
        t = rows.local.reshape(body["tensors"][name][1]) if part not in CUT else rows.local
        if name == "generator":
            saved["generator"] = t
        else:
            saved["factors"][number][part] = t
            if part == "body" and spread is not None:
                saved["factors"][number]["dim"] = body["tensors"][name][1][0]
    factor_file.load(kfac, saved, root, spread)


def _wanted(name: str, dtype: str, shape: list[int], saved: Mapping[str, Any], others: Exchange | None) -> FolderRows:
    """An empty place for the rows that this process needs."""
    number, _, part = name.partition(".")
    size = shape if part in CUT else [torch.Size(shape).numel()]
    start = 0
    if others is not None and part == "body" and saved["factors"][number]["kind"] != "dense":
        mine = others.features(shape[0])[others.rank]
        start, size = mine.start, [mine.stop - mine.start, *shape[1:]]
    return FolderRows(start, torch.empty(size, dtype=getattr(torch, dtype)))


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
        whole = found["sha256"] == _digest(body) and body["format"] == FORMAT
        whole = whole and all(isinstance(body[part], dict) for part in ("state", "files", "tensors"))
        whole = whole and all(isinstance(getattr(torch, dtype), torch.dtype) for dtype, _ in body["tensors"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise GramianError(f"folder: {str(place / INDEX)!r} is damaged; expected it as kfac.save_sharded wrote it")
    strange = sorted({path.name for path in place.glob("*.safetensors")} - body["files"].keys())
    if strange:  # tensors would be looked for in it, too
        raise GramianError(
            f"folder: {str(place / strange[0])!r} is no file of this state; expected its own files alone"
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


def _read(place: Path, wanted: Mapping[str, FolderRows]) -> None:
    """Fill the places; every process by itself."""
    held = {name: rows.box for name, rows in wanted.items() if rows.local.numel()}
    try:
        read_boxes(place, held)
    except CheckpointException as failure:
        reason = first_failure(failure)
        raise GramianError(f"folder: {str(place)!r} cannot be read ({reason}); expected a whole state") from None


# ---- both ------------------------------------------------------------------------------------------------------------


def _together(others: Exchange | None, do: Callable[[], Any]) -> list[Any]:
    """What each process's own part gave, in the order of ranks; or the first error, on all of them."""
    result, problem = None, ""
    try:
        result = do()
    except GramianError as error:
        problem = str(error)
    except Exception as error:
        problem = " ".join(f"folder: {type(error).__name__}: {error}".split()) + "; expected it to be usable"
    said = [[result, problem]] if others is None else others.tell([result, problem])
    for rank, (_, what) in enumerate(said):
        if what:
            raise GramianError(what if others is None or rank == 0 else f"process {rank}: {what}")
    return [given for given, _ in said]


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise GramianError(f"folder: expected a path, got {folder!r}")
    return Path(folder)


def _checksum(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
