"""Curvature for a private run, estimated on public data, because the accountant does not cover factors of private data.

A private model allows no other backward, so factors are estimated on a copy of it, which gets its weights before each refresh.
Preconditioning acts on gradients that already have their noise, so it costs no ε.
"""

import dataclasses

import torch
from torch import nn

from gramian.curvature import KFACNaturalGradient
from gramian.curvature.estimate.kfac_capture import IdleCapture
from gramian.data import Batches, Windows, load_tokenizer, read_stream
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.config.config import Config
from gramian.train.loop.precision import Precision
from gramian.train.loop.stepper import seed_all, terms_and_ids
from gramian.train.state.flat_state import tensors_of

SCALE = 2.0**12
"""Factor of the loss on public data in fp16, where the gradients that K-FAC sees would underflow otherwise."""


class PublicCurvature:
    """Refreshes the K-FAC factors of a private model on public windows.

    `copy` is a copy of the module (model and loss) that is not private, sharded in the same way. `kfac.public_files` are read
    as `data.files` are, or as text if the training data is the embedded corpus; processes divide a public batch as they do a
    training batch.
    """

    def __init__(
        self,
        module: nn.Module,
        copy: nn.Module,
        kfac: KFACNaturalGradient,
        config: Config,
        numbers: Precision,
        grid: ProcessGrid,
    ) -> None:
        assert config.kfac is not None
        data = config.data
        source = dataclasses.replace(data, source="text") if data.source == "embedded" else data
        stream = read_stream(
            source, config.kfac.public_files, load_tokenizer(data.tokenizer), field="kfac.public_files"
        )
        self.windows = Windows(stream, data.length, pack=data.pack, isolate=data.isolate)
        self._module, self.copy, self.kfac = module, copy, kfac
        self._seed, self._numbers, self._grid = config.run.seed, numbers, grid
        self._batches = Batches(
            self.windows,
            batch=data.batch,
            micro_batch=data.micro_batch,
            seed=config.run.seed,
            rank=grid.rank,
            world_size=grid.size,
            device=grid.device,
        )

    def refresh(self, number: int) -> None:
        """Count one step towards `update_freq`; when factors are due, estimate them on public batch `number`."""
        batch = next(self._batches.from_position(number))
        coefficient, scale = 1.0 / max(1, batch.tokens), SCALE if self._numbers.scales else 1.0
        observed = self.kfac.capture(self.copy, loss_reduction=coefficient, loss_scale=scale, **terms_and_ids(batch, 0))
        if isinstance(observed, IdleCapture):
            return
        with torch.no_grad():
            now = tensors_of(self._module)
            for name, own in tensors_of(self.copy).items():
                own.copy_(now[name])
        with observed as capture:
            for i, micro in enumerate(batch.micro):
                seed_all(self._seed, number, i, self._grid.rank)
                if i:
                    capture.next(**terms_and_ids(batch, i))
                with self._numbers.autocast():
                    loss, _ = self.copy(micro["tokens"], micro["targets"], coefficient * scale, micro.get("documents"))
                loss.backward()
                self.copy.zero_grad(set_to_none=True)
