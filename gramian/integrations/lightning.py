"""Callbacks of Lightning's `Trainer`: private training with its closures, and curvature measured in its steps.

```python
from gramian.integrations.lightning import PrivacyCallback

privacy = PrivacyCallback(noise_multiplier=1.0, max_grad_norm=1.0, target_delta=1e-5)
trainer = lightning.Trainer(max_epochs=3, callbacks=[privacy])
trainer.fit(module, train_dataloader)
privacy.epsilon()
```
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.integrations.trainer_privacy import TrainerPrivacy
from gramian.privacy.engine import PrivacyEngine
from gramian.privacy.noise.secrets import load_private, save_private
from gramian.privacy.sampling.population import batch_size_of
from gramian.privacy.sampling.private_loader import PrivateLoader

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
except ImportError:
    raise GramianError("lightning: is not installed; expected pip install lightning") from None


class Draws:
    """The loader that Lightning iterates over: every Poisson draw in a fixed number of batches.

    It is not a DataLoader, so Lightning neither gives it a sampler nor builds it again.
    """

    def __init__(self, loader: PrivateLoader, parts: int) -> None:
        """Let the private loader yield each draw in `parts` micro-batches."""
        loader.split(parts)
        self._loader, self._parts = loader, parts

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._loader) * self._parts

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of an epoch's draws."""
        yield from self._loader


class PrivacyCallback(Callback):
    """Private training in Lightning's own loop, with automatic or manual optimization and on several processes (DDP).

    An update is one Poisson draw, given to `training_step` in `accumulate_grad_batches` batches. The LightningModule must call
    itself in `training_step` (`self(x)`), whose rows are the records. ε is logged as "epsilon", on the steps that Lightning
    logs; what the module logs is computed on private records, and ε does not cover it.

    Checkpoints of Lightning do not contain the key of the noise: the engine's state is written beside, with mode 0600, into
    `folder`, and found there by a resumed run.
    """

    def __init__(self, *, folder: "str | os.PathLike[str] | None" = None, **privacy: Any) -> None:
        """Check the options.

        Args:
            folder: where the engine's states and the release counter are written; None: "privacy" in `default_root_dir`.
            **privacy: fields of `gramian.integrations.trainer_privacy.TrainerPrivacy`: target_delta, max_grad_norm,
                noise_multiplier or target_epsilon, and others. A larger draw takes more memory: accumulate_grad_batches bounds
                it, and there is no max_physical_batch here.

        Raises:
            GramianError: naming a field that is unknown, missing or invalid.
        """
        self.privacy = TrainerPrivacy.of(privacy)
        for field in {"max_physical_batch", "tokens_per_record"} & set(privacy):
            raise GramianError(f"{field}: is for Hugging Face's Trainer; expected accumulate_grad_batches, or none")
        if self.privacy.max_grad_norm is None:
            raise GramianError("max_grad_norm: is not given; expected C, the largest norm of one record's gradient")
        self.engine: PrivacyEngine = self.privacy.new_engine()
        """The engine, with the account of ε; it makes the module private while `fit` runs."""
        self._folder = None if folder is None else Path(folder)
        self._run_id = os.urandom(4).hex()
        self._resumed: dict[str, Any] | None = None
        self._trainer: Any = None

    def epsilon(self) -> float:
        """ε of all releases (noised sums) so far, at `target_delta`."""
        return self.engine.get_epsilon(self.privacy.target_delta)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse arguments of Lightning's Trainer that private training cannot follow."""
        if stage != "fit":
            return
        self._trainer = trainer
        if trainer.gradient_clip_val:
            raise GramianError(
                "gradient_clip_val: clips a sum that has no noise yet; expected none, max_grad_norm clips each record"
            )
        if trainer.accumulate_grad_batches > 1 and _scaler_of(trainer) is not None:
            raise GramianError(
                "accumulate_grad_batches: with a GradScaler two factors stand in the loss; expected 1, or bf16"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the module private, and let Lightning iterate over Poisson draws."""
        optimizers = trainer.strategy.optimizers
        if len(optimizers) != 1:
            raise GramianError(f"optimizer: the module has {len(optimizers)}; expected one for all that trains")
        parts = trainer.accumulate_grad_batches
        loader = trainer.fit_loop._data_source.dataloader()
        size = batch_size_of(loader)
        if size is None:
            raise GramianError("train_dataloader: has no batch_size; expected a DataLoader with one")
        expected = size * parts * trainer.world_size
        records, scaler = self.privacy.population(loader), _scaler_of(trainer)
        steps = _steps(trainer, max(1, round(records / expected)))
        noise = self.privacy.noise_for(steps, expected / records, records)
        averaged = 1.0 / parts if pl_module.automatic_optimization else 1.0  # by which Lightning multiplies the loss
        reduction = self.privacy.loss_reduction
        _, _, private = self.engine.make_private(
            module=trainer.strategy.model,
            optimizer=optimizers[0],
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=self.privacy.max_grad_norm or 0.0,
            expected_batch=expected,
            loss_reduction="mean" if reduction is None else reduction,
            loss_scale=averaged if scaler is None else scaler,
            **self.privacy.engine,
        )
        if self.privacy.target_epsilon is not None:
            self.engine.limit_epsilon(self.privacy.target_epsilon, self.privacy.target_delta, planned=steps)
        trainer.fit_loop._data_source = _DataLoaderSource(Draws(private, parts), "train_dataloader")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the engine's state, if the run is resumed; model and optimizer are loaded by now."""
        folder = self._folder_of(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if self._resumed is not None:
            self._run_id = self._resumed["run"]
            self.engine.load_state_dict(load_private(folder / self._resumed["file"]), replay=self.privacy.replay)
        counter = folder / f"releases_{self._run_id}.json"
        self.engine.bind_counter(counter, must_exist=self._resumed is not None)
        self._resumed = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log ε after a step, on the steps that Lightning logs."""
        if self.engine.stepped and trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            self.log("epsilon", self.epsilon(), rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        """Name of the file with the engine's state, which is written beside; the checkpoint has no secret in it."""
        if self._trainer is None or self.engine._installed is None:
            return {}
        state, name = self.engine.state_dict(), f"{self._run_id}_step_{self._trainer.global_step}.pt"
        if self._trainer.is_global_zero:
            save_private(self._folder_of(self._trainer) / name, state)
        return {"run": self._run_id, "file": name, "epsilon": self.epsilon(), "delta": self.privacy.target_delta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember which state a resumed run goes on from."""
        self._resumed = state_dict or None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the module back as it was."""
        if self.engine._installed is not None:
            self.engine.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module back as it was."""
        self.teardown(trainer, pl_module, "fit")

    def _folder_of(self, trainer: Any) -> Path:
        return self._folder or Path(trainer.default_root_dir) / "privacy"


class CurvatureCallback(Callback):
    """Refreshes K-FAC factors before the optimizer's steps of Lightning, and logs capacity metrics as "curvature/<name>".

    A refresh runs `kfac.collect_kfac_factors` on the last batch of the step: a forward and a backward more, on every
    `update_freq`-th step. The LightningModule's forward must return logits. To step with the natural gradient, return an
    optimizer of `gramian.precondition` with the same `kfac` from `configure_optimizers`.
    """

    def __init__(
        self,
        kfac: KFACNaturalGradient | None = None,
        *,
        fisher_type: str = "empirical",
        metrics: tuple[str, ...] = ("trace", "effective_dimension", "condition_number", "max_eigenvalue"),
        batch: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        """Store what is measured.

        Args:
            kfac: the curvature; None: one with the default options, refreshed every 100 steps.
            fisher_type: "empirical", "mc" or "true", as in `collect_kfac_factors`.
            metrics: which of the model's capacity metrics are logged.
            batch: makes (inputs, labels), or a mapping as Hugging Face models take it, of a batch of the loader.
        """
        self.kfac = KFACNaturalGradient(update_freq=100) if kfac is None else kfac
        self._fisher, self._metrics, self._convert = fisher_type, metrics, batch
        self._batch: Any = None
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse private training: factors of private records have no noise."""
        if any(isinstance(callback, PrivacyCallback) for callback in trainer.callbacks):
            raise GramianError(
                "callbacks: PrivacyCallback trains privately, and factors of its records would have no noise; expected "
                "curvature of public data (kfac.collect_kfac_factors on batches of it)"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remember the batch."""
        self._batch = batch

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Refresh the factors if a refresh is due; gradients stay as they are."""
        self.kfac.collect_kfac_factors(pl_module, self._convert(self._batch), self._fisher)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics of new factors."""
        if self.kfac.refreshes > self._logged:
            self._logged = self.kfac.refreshes
            found = self.kfac.compute_capacity_metrics()["model"]
            self.log_dict({f"curvature/{name}": float(found[name]) for name in self._metrics}, rank_zero_only=True)


def _scaler_of(trainer: Any) -> Any:
    """The GradScaler of Lightning's precision; None without one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _steps(trainer: Any, draws: int) -> int:
    """Number of optimizer steps of a fit with `draws` steps in an epoch, by max_steps and max_epochs."""
    ends = []
    if trainer.max_steps > 0:
        ends.append(int(trainer.max_steps))
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        ends.append(int(trainer.max_epochs) * draws)
    if not ends:
        raise GramianError("max_epochs: is not set, nor is max_steps; expected one of them, for ε has to know the end")
    return min(ends)
