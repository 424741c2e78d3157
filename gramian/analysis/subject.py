"""The subject of a curvature analysis: a model, its batches, and facts about both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.data import Windows, load_windows
from gramian.models.goose import Goose
from gramian.models.gpt import GPT
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config, load_config
from gramian.train.loop.objective import IGNORED
from gramian.train.state.run_folder import difference
from gramian.train.state.saved_run import is_run, load_run

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
PASS = 1024
"""Number of tokens per batch if the number of windows per batch is not given."""
Batch = Mapping[str, Any]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """The model that an analysis measures, and its batches.

    Example:
        `Subject(model, [{"tokens_BT": tokens, "labels": targets}])`.

    Attributes:
        model: returns logits [B, positions, V] when called with a batch without its "labels"; measured in evaluation mode.
        batches: keyword arguments of the model, and "labels" [B, positions]: the target of each position, −100 where there is
            none; nothing is shifted.
        model_facts: facts on the model and its weights, as JSON values.
        data_facts: facts on the tokens, as JSON values.
        notes: caveats that are printed with the results.
    """

    model: nn.Module
    batches: Sequence[Batch]
    model_facts: Mapping[str, Any] = field(default_factory=dict)
    data_facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise a GramianError if there is no batch, or a batch has no tensor "labels"."""
        if not self.batches:
            raise GramianError("batches: is empty; expected at least one batch")
        for batch in self.batches:
            if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
                raise GramianError('batches: one has no labels; expected mappings with a tensor "labels"')

    def to(self, device: torch.device, note: str) -> "Subject":
        """The same subject with model and batches on another device, and a further caveat; the model itself is moved."""
        batches = [
            {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            for batch in self.batches
        ]
        return replace(self, model=self.model.to(device), batches=batches, notes=[*self.notes, note])

    def share(self, rank: int, size: int) -> list[tuple[Tensor, Batch]]:
        """The part of every batch that process `rank` of `size` computes, as (numbers of its rows among all rows, batch).

        Row i of all batches belongs to process i mod `size`; a part without rows is left out. One process has all rows.
        """
        found: list[tuple[Tensor, Batch]] = []
        first = 0
        for batch in self.batches:
            rows_B = torch.arange(first, first + len(batch["labels"]))
            mine = slice((rank - first) % size, None, size)
            if len(rows_B[mine]):
                part = {name: value[mine] if isinstance(value, Tensor) else value for name, value in batch.items()}
                found.append((rows_B[mine], part))
            first += len(rows_B)
        return found

    @property
    def terms(self) -> int:
        """Number of labels, over all batches, that have a loss term."""
        return sum(int((batch["labels"] != IGNORED).sum()) for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model reads in all batches; if its inputs are not ids, number of label positions."""
        return sum(_first(batch).numel() for batch in self.batches)

    @property
    def parameters(self) -> int:
        """Number of trained parameters of the model; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def from_config(config: Config, device: torch.device, dtype: str | None, tokens: int, rows: int | None) -> Subject:
    """Load the model of a training config, with the weights of its run if there is one, and windows of its training data.

    `dtype` is "fp32" or "fp64"; None: that of the config, at least fp32. About `tokens` tokens are read, in windows evenly
    spaced over the data, with `rows` windows per batch (None: as many as have 1024 tokens).

    Raises:
        GramianError: if a field of the config does not fit; the message names it.
    """
    training, _ = load_windows(config.data)
    model, weights = load_weights(config, training.vocabulary)
    kind = dtype or ("fp64" if config.precision.kind == "fp64" else "fp32")
    notes = []
    if config.privacy is not None:
        notes.append("Computed on private training data: not covered by ε.")
    if config.teacher is not None:
        notes.append("The loss is the cross entropy of the data; the teacher has no part in it.")
    digest = {} if config.privacy is not None else {"digest": training.digest}  # it would identify private data
    chosen = evenly_spaced(len(training), -(-tokens // config.data.length))
    return Subject(
        model=model.to(device=device, dtype=DTYPES[kind]).eval(),
        batches=[_batch(model, training, part, device) for part in pieces(chosen, rows, config.data.length)],
        model_facts={"kind": config.model.kind, "weights": weights, "dtype": kind, "config_hash": config.hash},
        data_facts={
            "source": config.data.source,
            "files": list(config.data.files),
            **digest,
            "length": config.data.length,
            "windows": len(chosen),
            "windows_in_all": len(training),
        },
        notes=notes,
    )


def evenly_spaced(total: int, wanted: int) -> Int64s:
    """Choose `wanted` of `total` window numbers, evenly spaced from the first to the last; all of them if there are fewer."""
    return np.unique(np.linspace(0, total - 1, min(total, wanted)).round().astype(np.int64))


def pieces(chosen: Int64s, rows: int | None, length: int) -> list[Int64s]:
    """Split window numbers into batches of `rows` windows; None: as many as have 1024 tokens."""
    rows = rows or max(1, PASS // length)
    return [chosen[start : start + rows] for start in range(0, len(chosen), rows)]


def load_weights(config: Config, vocabulary: int) -> tuple[nn.Module, str]:
    """Load a config's model and describe where its weights are from; raises if its folder has a run of another config."""
    folder = Path(config.run.folder)
    if not is_run(folder) or not any(folder.glob("checkpoints/*")):
        return build_model(config, vocabulary), "fresh" if config.model.path is None or config.model.fresh else "loaded"
    before = load_config(folder / "config.toml")
    if before.hash != config.hash:
        raise GramianError(
            f"run.folder: {folder} holds a run of another config ({difference(before, config)}); "
            "expected the config of that run, or another folder"
        )
    saved = load_run(folder, "run.folder")
    return saved.model, f"step {saved.step}{', the best' if saved.best else ''}, of {saved.folder}"


def _batch(model: nn.Module, windows: Windows, index: Int64s, device: torch.device) -> Batch:
    """Stack windows of the data as a batch: inputs under the names of the model's arguments, and "labels"."""
    rows = {name: values.to(device) for name, values in windows.stack(index).items()}
    if not isinstance(model, GPT | Goose):
        return {"input_ids": rows["tokens"], "use_cache": False, "labels": rows["targets"]}
    documents = {"documents_BT": rows["documents"]} if "documents" in rows else {}
    return {"tokens_BT": rows["tokens"], **documents, "labels": rows["targets"]}


def _first(batch: Batch) -> Tensor:
    found: Tensor = next(iter(batch.values()))
    return batch["labels"] if found.is_floating_point() else found
