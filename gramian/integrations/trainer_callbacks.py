"""Callbacks of Hugging Face's `Trainer`: curvature and gradient norms, measured in its own steps and logged by its own log."""

from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.statistics import per_sample_norms

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError:
    raise GramianError("transformers: is not installed; expected pip install 'gramian[hf]'") from None


class PrivacyState(TrainerCallback, ExportableState):
    """Stores ε and the parameters of the mechanism in `trainer_state.json`, under stateful_callbacks."""

    def __init__(self) -> None:
        """Begin with an empty record, which `PrivateTrainer` fills."""
        self.record: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` gets."""
        return {"args": {}, "attributes": {"record": self.record}}


class CurvatureCallback(TrainerCallback):
    """Refreshes K-FAC factors before the optimizer's steps of a Trainer, and logs capacity metrics.

    ```python
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(CurvatureCallback(trainer, KFACNaturalGradient(update_freq=100)))
    trainer.train()
    ```

    A refresh runs `kfac.collect_kfac_factors` on the last micro-batch of the step: a forward and a backward more, on every
    `update_freq`-th step. To step with the natural gradient, give Trainer an optimizer of `gramian.precondition` with the same
    `kfac`. On several processes their micro-batches are joined.
    """

    def __init__(
        self,
        trainer: Any,
        kfac: KFACNaturalGradient | None = None,
        *,
        fisher_type: str = "empirical",
        metrics: tuple[str, ...] = ("trace", "effective_dimension", "condition_number", "max_eigenvalue"),
    ) -> None:
        """Observe the batches of a trainer.

        Args:
            trainer: the Trainer whose steps are used, and whose log gets the metrics.
            kfac: the curvature; None: one with the default options, refreshed every 100 steps.
            fisher_type: "empirical", "mc" or "true", as in `collect_kfac_factors`.
            metrics: which of the model's capacity metrics are logged, as "curvature/<name>".

        Raises:
            GramianError: for a private trainer: factors of private records have no noise.
        """
        if hasattr(trainer, "update_norms"):
            raise GramianError(
                "trainer: is private, and factors of its records would have no noise; expected curvature of public data "
                "(kfac.collect_kfac_factors on batches of it)"
            )
        self.kfac = KFACNaturalGradient(update_freq=100) if kfac is None else kfac
        self._trainer, self._fisher, self._metrics = trainer, fisher_type, metrics
        self._batch: dict[str, Any] | None = None
        self._logged = 0
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to remember the inputs of the model's training forwards."""
        self._hook = kwargs["model"].register_forward_pre_hook(self._remember, with_kwargs=True)

    def _remember(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and "labels" in kwargs:
            self._batch = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh the factors if a refresh is due, before the optimizer steps."""
        if self._batch is None:
            raise GramianError("train_dataset: the model got no labels; expected batches with labels, for the Fisher")
        for other in self._trainer.callback_handler.callbacks:
            if isinstance(other, NormsCallback):  # its observation must not take in the passes of a refresh
                other.on_pre_optimizer_step(args, state, control)
        batch, self._batch = self._batch, None
        self.kfac.collect_kfac_factors(kwargs["model"], batch, self._fisher)
        self._batch = None  # the passes of the refresh were forwards, too

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the metrics of new factors, on the steps that Trainer logs."""
        if control.should_log and self.kfac.refreshes > self._logged:
            self._logged = self.kfac.refreshes
            found = self.kfac.compute_capacity_metrics()["model"]
            _log(self._trainer, control, {f"curvature/{name}": float(found[name]) for name in self._metrics})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hook from the model."""
        self._hook.remove()


class NormsCallback(TrainerCallback):
    """Logs the norms of per-record gradients, measured in the own backwards of a Trainer's steps.

    ```python
    trainer.add_callback(NormsCallback(trainer))  # "gradient_norms/mean", "/median" and "/max" on every step that is logged
    ```

    The gradient of record i is the number of records of the update times its share of the update's gradient, so their mean is
    that gradient. Norms are of the records of this process. For a `PrivateTrainer` they are those before clipping, without
    noise, and listed in its history as not covered by ε.
    """

    def __init__(self, trainer: Any, *, every: int | None = None, proof: "str | int" = "auto") -> None:
        """Measure in the steps of `trainer`.

        Args:
            trainer: the Trainer whose backwards are observed, and whose log gets the norms.
            every: number of steps from one measurement to the next; None: `logging_steps`.
            proof: as in `per_sample_norms`.
        """
        if every is not None and not (isinstance(every, int) and every > 0):
            raise GramianError(f"every: expected a number of steps above 0, got {every!r}")
        self._trainer, self._every, self._proof = trainer, every, proof
        self._private, self._due = hasattr(trainer, "update_norms"), False
        self._capture: Any = None
        self._values: list[torch.Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to observe, if norms are due in this step."""
        every = self._every or state.logging_steps
        if not every or (state.global_step + 1) % every:
            return
        if self._private:
            self._due = True
            return
        model = self._trainer.accelerator.unwrap_model(kwargs["model"])
        scaler = self._trainer.accelerator.scaler
        self._capture = per_sample_norms(model, "sum", proof=self._proof, loss_scale=1.0 if scaler is None else scaler)
        self._capture.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the observation of a step's backwards."""
        if self._due:
            self._due, self._values = False, list(self._trainer.update_norms)
        if self._capture is not None:
            capture, self._capture = self._capture, None
            capture.__exit__(None, None, None)
            self._values.append(capture.values * len(capture.values))  # micro-batches may differ in size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the norms of the step."""
        if not self._values:
            return
        norms, self._values = torch.cat(self._values), []
        if len(norms):
            found = {"mean": norms.mean(), "median": norms.median(), "max": norms.max()}
            _log(self._trainer, control, {f"gradient_norms/{name}": float(value) for name, value in found.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an observation under way."""
        if self._capture is not None:
            self._capture.__exit__(None, None, None)


def _log(trainer: Any, control: Any, numbers: dict[str, float]) -> None:
    """Log numbers in the middle of a step; Trainer's own line of the step, which a log would call off, still follows."""
    due = control.should_log
    trainer.log(numbers)
    control.should_log = due
