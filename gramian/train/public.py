"""Curvature for a private run, from public data: factors of private data would be outside the accountant.

The model is private and takes no other backward, so factors are estimated on a copy of it, which gets its weights before each
refresh. Preconditioning acts on gradients that have their noise already: it costs no ε.
"""

import copy
import dataclasses

import torch
from torch import nn

from gramian.curvature import KFACNaturalGradient
from gramian.parallel.world import World
from gramian.train.config import Config
from gramian.train.data import Windows, load_tokenizer, read_stream
from gramian.train.data.order import windows_at
from gramian.train.objective import IGNORED
from gramian.train.precision import Numbers


class PublicCurvature:
    """Keeps K-FAC factors of a model up to date, on public windows."""

    def __init__(
        self, module: nn.Module, kfac: KFACNaturalGradient, config: Config, numbers: Numbers, world: World
    ) -> None:
        """Copy the model, before it is made private, and read the public files.

        Args:
            module: model and loss.
            kfac: gets the factors.
            config: of the run; `kfac.public_files` are read as `data.files` are, as text beside the embedded corpus.
            numbers: the precision.
            world: this process.
        """
        assert config.kfac is not None
        data = config.data
        source = dataclasses.replace(data, source="text") if data.source == "embedded" else data
        stream = read_stream(
            source, config.kfac.public_files, load_tokenizer(data.tokenizer), field="kfac.public_files"
        )
        self.windows = Windows(stream, data.length, pack=data.pack, isolate=data.isolate)
        self._module, self._copy, self.kfac = module, copy.deepcopy(module), kfac
        self._batch, self._seed, self._numbers, self._world = data.batch, config.run.seed, numbers, world

    def refresh(self, number: int) -> None:
        """One step of `update_freq`, at the current weights, on the public batch of this number."""
        with torch.no_grad():
            for own, p in zip(self._copy.parameters(), self._module.parameters(), strict=True):
                own.copy_(p)
        batch = self.windows.stack(windows_at(number, len(self.windows), self._batch, self._seed))
        batch = {name: value.to(self._world.device) for name, value in batch.items()}
        terms = int((batch["targets"] != IGNORED).sum())
        with self.kfac.capture(self._copy, loss_reduction="mean", num_terms=terms), self._numbers.autocast():
            loss, _ = self._copy(batch["tokens"], batch["targets"], 1.0 / terms, batch.get("documents"))
            loss.backward()
        self._copy.zero_grad(set_to_none=True)
