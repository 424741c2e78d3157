"""Private training in the same loop: a draw in place of a batch, the engine's step in place of clip and step.

A window's loss is the sum over its tokens, over `data.length`; the unit of privacy is one window. Loss and data order are not
covered by ε; the gradient norm is that of the noised gradient.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from gramian.data.batches import DataWorkerDied, keep_deaths_for_the_next_batch, leave_group
from gramian.data.windows import Windows
from gramian.parallel.world import World
from gramian.privacy import PrivacyEngine
from gramian.train.config.config import Config
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.precision import Numbers
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.loop.stepper import Taken, seed_all


@dataclass(frozen=True)
class Draw:
    """One Poisson draw, in pieces."""

    position: int
    """Its number."""
    pieces: Iterator[dict[str, Tensor]]


class PrivateStepper:
    """Model, optimizer, scaler and engine, and how they take a step."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        numbers: Numbers,
        world: World,
        config: Config,
        windows: Windows,
        curvature: PublicCurvature | None = None,
    ) -> None:
        """Make the model private.

        Args:
            module: objective, spread over processes.
            optimizer: over its parameters.
            numbers: the precision.
            world: this process among the others.
            config: of the run.
            windows: the records.
            curvature: refreshes the factors that the optimizer is preconditioned with.
        """
        assert config.privacy is not None
        self.module, self.optimizer, self.numbers, self.world = module, optimizer, numbers, world
        self.scaler, self.curvature = numbers.scaler(), curvature
        self.kfac = None if curvature is None else curvature.kfac
        self.captured = module if curvature is None else curvature.copy
        """Whose passes K-FAC sees."""
        options, data = config.privacy, config.data
        self._seed, self._length = config.run.seed, data.length
        self.engine = PrivacyEngine(
            options.accountant,
            insecure_reproducible=options.insecure_reproducible,
            seed=config.run.seed if options.insecure_reproducible else None,
        )
        loader: DataLoader[Any] = DataLoader(
            windows,
            batch_size=max(1, data.batch // world.size),
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=data.workers > 0,
            pin_memory=world.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=leave_group,
        )
        told: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": loader,
            "max_grad_norm": options.max_grad_norm,
            "clipping": options.clipping,
            "proof": options.proof,
            "loss_reduction": "sum",
            "loss_scale": 1.0 if self.scaler is None else self.scaler,
            "max_physical_batch": data.micro_batch or None,
            "expected_batch": float(data.batch),
        }
        if options.target_epsilon is not None:
            rate = data.batch / len(windows)
            _, _, self._loader = self.engine.make_private_with_epsilon(
                target_epsilon=options.target_epsilon,
                target_delta=options.delta,
                epochs=config.run.steps * rate,
                **told,
            )
        else:
            noise = options.noise_multiplier or 0.0
            _, _, self._loader = self.engine.make_private(noise_multiplier=noise, **told)
        self._delta, self._windows, self._proves = options.delta, windows, options.proof != "off"
        self._rows = max(2, min(len(windows), data.micro_batch or data.batch // world.size))

    def prove_loss(self) -> None:
        """Prove that the run's loss keeps windows apart, unless privacy.proof is "off".

        The same windows on every process, spread over the data, as many as a backward takes. Cost: see
        `PrivacyEngine.check_independence`.

        Raises:
            GramianError: naming the layer whose rows change with other windows.
        """
        if self._proves and len(self._windows) > 1:
            places = np.linspace(0, len(self._windows) - 1, self._rows).astype(np.int64)
            rows = {name: value.to(self.world.device) for name, value in self._windows.stack(places).items()}
            self.engine.check_independence(lambda model, rows: self.loss(model, rows)[0], rows)

    def loss(self, module: nn.Module, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss to go back from, times the loss scale, and Σ −log p."""
        with self.numbers.autocast():
            loss, nats = module(rows["tokens"], rows["targets"], 1.0 / self._length, rows.get("documents"))
        return loss if self.scaler is None else self.scaler.scale(loss), nats

    def epsilon(self) -> float:
        """ε of the releases before the next; what a replay repeats counts once."""
        return self.engine.get_epsilon(self._delta, self.engine.released)

    def batches(self) -> Iterator[Draw]:
        """Draws without end; which ones, the secret key and the release counter decide.

        Raises:
            DataWorkerDied: the next call goes on with new workers, and the same draw.
        """
        while True:
            for pieces in self._alive(self._loader.draws()):
                keep_deaths_for_the_next_batch()
                yield Draw(self.engine.released, self._alive(pieces))
                self._refuse_dead()

    def close(self) -> None:
        """End the data workers; `batches` starts new ones."""
        workers, self._loader._iterator = self._loader._iterator, None
        end = getattr(workers, "_shutdown_workers", None)
        if end is not None:
            end()

    def _alive(self, items: Iterator[Any]) -> Iterator[Any]:
        """The same items; a dead worker in one line."""
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except RuntimeError as problem:
                if "DataLoader worker" not in str(problem):
                    raise
                raise self._died(str(problem).splitlines()[0]) from None
            yield item

    def _refuse_dead(self) -> None:
        """Between two draws: told at once, where the loader would wait for a batch for seconds."""
        for worker in getattr(self._loader._iterator, "_workers", ()):
            if not worker.is_alive():
                raise self._died(f"worker {worker.pid} died")

    def _died(self, how: str) -> DataWorkerDied:
        self.close()
        return DataWorkerDied(
            f"data.workers: {how}; expected enough memory for all, or fewer workers; 0 reads in the training process"
        )

    def take(self, batch: Draw, rate: float, flag: bool = False) -> Taken:
        """One private step; see `Stepper.take`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.curvature is not None:
            self.curvature.refresh(batch.position)
        total = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        total[1] = float(flag)
        before = 1.0 if self.scaler is None else self.scaler.get_scale()
        for i, piece in enumerate(batch.pieces):
            piece = {name: value.to(self.world.device, non_blocking=True) for name, value in piece.items()}
            seed_all(self._seed, batch.position, i, self.world.rank)
            self.optimizer.zero_grad(set_to_none=True)
            loss, nats = self.loss(self.module, piece)
            self.engine.backward(loss)
            total[0] += nats
            total[2] += (piece["targets"] != IGNORED).sum()
            self._step()
        norm = get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        stepped = self.scaler is None or self.scaler.get_scale() >= before
        return Taken(torch.cat([self.world.sum_(total), norm.detach().to(total)[None]]), stepped)

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
