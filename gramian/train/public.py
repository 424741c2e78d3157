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

SCALE = 2.0**12
"""Of the public loss in half precision, whose gradients would underflow."""


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
        self._module, self.copy, self.kfac = module, copy.deepcopy(module), kfac
        self._batch, self._seed, self._numbers, self._world = data.batch, config.run.seed, numbers, world
        self._rows = data.micro_batch or data.batch

    def refresh(self, number: int) -> None:
        """One step of `update_freq`, at the current weights, on the public batch of this number."""
        with torch.no_grad():
            for own, p in zip(self.copy.parameters(), self._module.parameters(), strict=True):
                own.copy_(p)
        chosen = windows_at(number, len(self.windows), self._batch, self._seed)
        pieces = [self.windows.stack(chosen[i : i + self._rows]) for i in range(0, len(chosen), self._rows)]
        terms = [int((piece["targets"] != IGNORED).sum()) for piece in pieces]
        coefficient, scale = 1.0 / sum(terms), SCALE if self._numbers.scales else 1.0
        with self.kfac.capture(self.copy, loss_reduction=coefficient, num_terms=terms[0], loss_scale=scale) as capture:
            for i, (piece, count) in enumerate(zip(pieces, terms, strict=True)):
                if capture is not None and i:
                    capture.next(num_terms=count)
                piece = {name: value.to(self._world.device) for name, value in piece.items()}
                with self._numbers.autocast():
                    loss, _ = self.copy(piece["tokens"], piece["targets"], coefficient * scale, piece.get("documents"))
                loss.backward()
                self.copy.zero_grad(set_to_none=True)
