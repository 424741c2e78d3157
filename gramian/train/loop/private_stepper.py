"""Takes the steps of a private run: a Poisson draw in place of a batch; the privacy engine clips and adds noise.

The loss of a window is the sum over its tokens divided by `data.length`; the privacy guarantee holds for one window, or with
privacy.unit = "document" or "user" for all windows of one, the sum of whose gradients is clipped. ε covers neither the reported
loss nor the order of the data; the reported gradient norm is that of the gradient with noise.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, default_collate

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.data.batches import DataWorkerDied, leave_process_group, shut_down_workers, suppress_worker_death_errors
from gramian.data.document_rows import DocumentWindows, PackedRows
from gramian.data.windows import Windows
from gramian.kernels.normal_tail import NORMALS_VERSION
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy import PrivacyEngine
from gramian.privacy.clipping.clip_factors import layer_limits
from gramian.privacy.clipping.norm_histogram import BINS, FIELDS, histogram_metrics, norm_counts
from gramian.privacy.clipping.trained_parameters import trained_parameters
from gramian.privacy.noise.noise_strategy import buffers_of
from gramian.privacy.sampling.physical_batch import LOOKED_AT, plan_physical_batch
from gramian.taps.model.user_names import unwrap
from gramian.train.config.config import Config
from gramian.train.config.config_sections import PrivacySection
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.objective import IGNORED
from gramian.train.loop.precision import Precision
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.loop.stepper import TRUST_REGION, Stepper, TakenStep, seed_all


@dataclass(frozen=True)
class Draw:
    """One Poisson draw of windows, in micro-batches (`pieces`, {name: [windows, T]}) that fit one backward pass each."""

    position: int
    """Number of the draw: the number of releases (published noised sums) before it."""
    pieces: Iterator[dict[str, Tensor]]


class PrivateStepper(Stepper):
    """Takes the steps of DP-SGD training with a `PrivacyEngine`, which makes the model private at construction.

    The config has a [privacy] section; each of `windows`, or of their documents or users, is one unit. `curvature` refreshes
    the K-FAC factors that precondition the optimizer or are the metric of clipping and noise; None: no K-FAC.
    """

    repeatable = False
    extra = FIELDS

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        numbers: Precision,
        grid: ProcessGrid,
        config: Config,
        windows: Windows,
        curvature: PublicCurvature | None = None,
    ) -> None:
        assert config.privacy is not None
        self.module, self.optimizer, self.numbers, self.grid = module, optimizer, numbers, grid
        self.scaler, self.curvature = numbers.scaler(), curvature
        self.kfac = None if curvature is None else curvature.kfac
        if curvature is not None and config.kfac is not None and config.kfac.precondition:
            self.extra = (*self.extra, *TRUST_REGION)
        self.captured = module if curvature is None else curvature.copy
        options, data = config.privacy, config.data
        self._seed, self._length = config.run.seed, data.length
        self.engine = PrivacyEngine(
            options.accountant,
            insecure_reproducible=options.insecure_reproducible,
            seed=config.run.seed if options.insecure_reproducible else None,
        )
        self.stopwatch = self.engine.stopwatch
        records: Any = windows
        self._pack: PackedRows | None = None
        unit_of, units = None, len(windows)
        if options.unit != "window":
            own = DocumentWindows(windows, by_user=options.unit == "user")
            records, unit_of, units = own.windows, own.units, len(np.unique(own.units))
            most = min(int(np.bincount(own.units).max()), options.max_records_per_unit or len(own))
            if data.micro_batch and most > data.micro_batch:
                raise GramianError(
                    f"data.micro_batch: is {data.micro_batch}, and a {options.unit} has {most} windows, which have to be in "
                    "one backward; expected at least as many, 0, or a smaller privacy.max_records_per_unit"
                )
            if data.pack:
                records, self._pack = own, PackedRows(data.length, windows.stream.end)
        loader: DataLoader[Any] = DataLoader(
            records,
            collate_fn=self._pack,
            batch_size=max(1, data.batch // grid.size),
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=data.workers > 0,
            pin_memory=grid.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=leave_process_group,
        )
        if data.batch > units:
            raise GramianError(
                f"data.batch: {data.batch:,} {options.unit}s of {units:,} cannot be drawn; expected at most {units:,}"
            )
        arguments: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": loader,
            "max_grad_norm": options.max_grad_norm,
            "clip_function": options.clip_function,
            "noise": options.noise,
            "bands": options.bands,
            "releases": config.run.steps if options.noise == "bandmf" else None,
            "clipping": options.clipping,
            "poisson_sampling": True if options.max_draw is None else "truncated",
            "max_draw": options.max_draw,
            "proof": options.proof,
            "metric": self._metric(options),
            "loss_reduction": "sum",
            "loss_scale": 1.0 if self.scaler is None else self.scaler,
            "max_physical_batch": data.micro_batch or None,
            "expected_batch": float(data.batch),
            "unit_of": unit_of,
            "max_records_per_unit": options.max_records_per_unit,
        }
        self._options, self._records, self._steps = options, records, config.run.steps
        if options.layer_norms:
            names = trained_parameters(unwrap(module), optimizer)
            arguments["max_grad_norm"] = layer_limits(options.layer_norms, options.max_grad_norm, [*names])
        if options.max_physical_batch:
            arguments["max_physical_batch"] = self._physical_batch()
        if options.target_epsilon is not None:
            epochs = config.run.steps * (data.batch / units)
            _, _, self._loader = self.engine.make_private_with_epsilon(
                target_epsilon=options.target_epsilon, target_delta=options.delta, epochs=epochs, **arguments
            )
        else:
            noise = options.noise_multiplier or 0.0
            _, _, self._loader = self.engine.make_private(noise_multiplier=noise, **arguments)
        self._rows = max(2, min(len(records), self.engine.max_physical_batch or data.batch // grid.size))

    def _physical_batch(self) -> int:
        """Number of windows of a backward for which `privacy.max_physical_batch` has room, by the run's own forward."""
        options, one = self._options, self.some_rows(LOOKED_AT)
        forwards = (partial(self._forward, {name: t[i : i + 1] for name, t in one.items()}) for i in range(LOOKED_AT))
        return plan_physical_batch(
            options.max_physical_batch, self.module, unwrap(self.module), self.optimizer, forwards,
            clipping=options.clipping, memory_budget=None, noise_buffers=buffers_of(options.noise, options.bands),
            records=len(self._records),
        )  # fmt: skip

    def _metric(self, options: PrivacySection) -> KFACNaturalGradient | None:
        if self.kfac is None or options.metric == "plain":
            return None
        self.kfac.public = True  # `kfac.public_files` are public, as the config says
        return self.kfac

    def prepare(self) -> None:
        """Check that the loss of a unit does not depend on other units, unless privacy.proof is "off".

        All processes use the same windows, spread evenly over the data, as many as one backward pass has. Raises a GramianError
        that names the layer whose rows change. Cost: see `PrivacyEngine.check_independence`.
        """
        if self._options.proof != "off" and len(self._records) > 1:
            self.prove_loss(self.some_rows(self._rows))

    def some_rows(self, count: int) -> dict[str, Tensor]:
        """Rows of `count` windows, spread evenly over the data, as a draw would have them."""
        places = np.linspace(0, len(self._records) - 1, count).astype(np.int64)
        items = [self._records[int(place)] for place in places]
        rows = default_collate(items) if self._pack is None else self._pack(items)
        return self._placed(rows)

    def _placed(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows on the run's device; the units of their tokens stay on the host, where they are read."""
        device = self.grid.device
        return {name: t if name == "units" else t.to(device, non_blocking=True) for name, t in rows.items()}

    def prove_loss(self, rows: dict[str, Tensor]) -> None:
        """Prove that the loss of these rows does not mix units; raises a GramianError that names the layer if it does."""
        with self._units(rows):
            self.engine.check_independence(lambda model, rows: self.loss(model, rows)[0], rows)

    def _units(self, rows: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        return self.engine.units(rows["units"]) if "units" in rows else nullcontext()

    def _forward(self, rows: Mapping[str, Tensor], module: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        with self.numbers.autocast():
            made: tuple[Tensor, Tensor] = (module or self.module)(
                rows["tokens"], rows["targets"], 1.0 / self._length, rows.get("documents")
            )
        return made

    def loss(self, module: nn.Module, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss of some windows to differentiate, Σ −log p(target) / data.length times the loss scale, and Σ −log p(target)."""
        with self._units(rows):
            loss, nats = self._forward(rows, module)
        return loss if self.scaler is None else self.scaler.scale(loss), nats

    def draws(self) -> Iterator[Draw]:
        """Endless Poisson draws of windows, which follow from the secret key and the number of releases (noised sums) so far.

        Raises `DataWorkerDied`; the next call continues with new workers and the same draw.
        """
        while True:
            for pieces in self._alive(self._loader.draws()):
                suppress_worker_death_errors()
                yield Draw(self.engine.released, self._alive(pieces))
                self._refuse_dead()

    def close(self) -> None:
        """End the data workers; the next call of `draws` starts new ones."""
        workers, self._loader._iterator = self._loader._iterator, None
        shut_down_workers(workers)

    def _alive(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of an iterator over data; the death of a data worker becomes a `DataWorkerDied` of one line."""
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
        """Raise for a data worker that died between two draws, where the loader would wait seconds for a batch."""
        for worker in getattr(self._loader._iterator, "_workers", ()):
            if not worker.is_alive():
                raise self._died(f"worker {worker.pid} died")

    def _died(self, how: str) -> DataWorkerDied:
        self.close()
        return DataWorkerDied.because(how)

    def take(self, batch: Draw, rate: float, flag: bool = False) -> TakenStep:
        """Take one DP-SGD step on a draw: one noised gradient sum (a release) is published; its metrics stay on the device."""
        self.set_rate(rate)
        if self.curvature is not None:
            self.curvature.refresh(batch.position)
        total = torch.zeros(3 + BINS + 1, dtype=torch.float64, device=self.grid.device)
        total[1] = float(flag)
        before = 1.0 if self.scaler is None else self.scaler.get_scale()
        for i, piece in enumerate(batch.pieces):
            piece = self._placed(piece)
            seed_all(self._seed, batch.position, i, self.grid.rank)
            self.optimizer.zero_grad(set_to_none=True)
            loss, nats = self.loss(self.module, piece)
            self.engine.backward(loss)
            total[0] += nats
            total[2] += (piece["targets"] != IGNORED).sum()
            if self.engine.last is not None:
                total[3:] += norm_counts(self.engine.last.norms_B.to(total.device), self._options.max_grad_norm)
            self._step()
        norm = get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        stepped = self.scaler is None or self.scaler.get_scale() >= before
        total = self.grid.sum_(total)
        own = norm.detach().to(total)[None]
        return TakenStep(torch.cat([total[:3], own, total[3:], self._trust_region(total)]), stepped)

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Metrics of a step for the log: those of all steps, and the histogram of per-sample gradient norms before clipping."""
        norms = histogram_metrics(outcome.extra, self._options.max_grad_norm)
        return {**super().metrics(outcome), "sample_norms": norms}

    def plans(self) -> dict[str, Any]:
        """{"clipping": how the last backward computed norms and clipped sums, as a table}; empty before the first one."""
        plan = self.engine.plan
        return {} if plan is None else {"clipping": plan.table().facts()}

    # ---- state and privacy -------------------------------------------------------------------------------------------

    def data_digests(self) -> dict[str, str]:
        """{"curvature": digest of the public data on which curvature is estimated}; empty without K-FAC."""
        return {} if self.curvature is None else {"curvature": self.curvature.windows.digest}

    def sections(self) -> dict[str, Any]:
        """State by section: the privacy engine's, with its secret key, and K-FAC's."""
        return {"privacy": self.engine.state_dict(), **super().sections()}

    def attach(self, folder: Path, *, resumed: bool) -> None:
        """Store the count of releases (noised sums) in `releases.json` of the run folder, which must exist if resumed."""
        self.engine.bind_counter(folder / "releases.json", must_exist=resumed)

    def resume(self, sections: Mapping[str, Any], *, replay: bool) -> str | None:
        """Restore the privacy engine from a checkpoint; returns why its steps are not replayed, or None.

        A rollback does not restore it, because releases (published noised sums) are never taken back.
        """
        self.engine.load_state_dict(sections["privacy"], replay=replay)
        return self.engine.not_replayed

    def groups_of_records(self) -> tuple[int, Any] | None:
        """(number of groups, group of each unit) of cyclic sampling; None: draws are from all units. For an audit."""
        groups = self._loader.groups
        return None if groups is None else (groups.count, groups.of(self._loader.draws_of_epoch.size))

    def exhausted(self, steps: int) -> bool:
        """Whether all `steps` releases that target_epsilon, or noise "bandmf", allows were made; repeated ones count too."""
        limited = self._options.target_epsilon is not None or self._options.noise == "bandmf"
        return limited and self.engine.released >= steps

    def epsilon(self) -> float:
        """ε of all releases (published noised sums) so far; one that a resumed run repeats exactly counts once."""
        return self.engine.get_epsilon(self._options.delta, self.engine.released)

    def privacy_record(self) -> dict[str, Any]:
        """Parameters of the DP mechanism; "proof": whether each row of a layer was proven to depend on one sample only."""
        return {
            "noise_multiplier": self.engine.noise_multiplier,
            "noise": self.engine.noise_record(self._steps),
            "sample_rate": self.engine.sample_rate,
            "expected_batch": self.engine.expected_batch,
            "unit": f"one {self._options.unit}",
            "adjacency": self.engine.adjacency,
            "max_records_per_unit": self._options.max_records_per_unit,
            "max_draw": self._options.max_draw,
            "max_physical_batch": self.engine.max_physical_batch,
            "clip_function": self._options.clip_function,
            "clip_norm": self.engine.clip_norm,
            "metric": self.engine.metric,
            "noise_generator": NORMALS_VERSION,
            "decisions": self._options.decisions,
            "insecure_reproducible": self._options.insecure_reproducible,
            "proof": self.engine.proof,
        }
