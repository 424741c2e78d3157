"""Gradient noise scale and layer health of a training step: one more forward and backward of its batch, with taps.

In: the batch of a step. Out: {"noise_scale", "noise_trace", "noise_signal", "layers"} for the log. The step itself is not
touched: the passes here leave no gradient, and dropout draws what it draws in the step. Cost: a forward and a backward with
per-sample norms for every `run.observe_every` steps, and once a row proof (see `gramian.taps.proof`).
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.data import StepBatch
from gramian.parallel.all_reduce import all_reduce
from gramian.statistics import Health, LayerHealth, NoiseScale
from gramian.taps.capture import Capture
from gramian.taps.roles import SAMPLES
from gramian.train.build.run_parts import Parts
from gramian.train.loop.objective import IGNORED, Objective
from gramian.train.loop.stepper import seed_all
from gramian.train.state.run_log import RunLog


class GradientStatistics:
    """Measures the noise scale and the health of every layer on the batches of a run.

    Example:
        >>> GradientStatistics(parts).measure(batch)["noise_scale"]  # doctest: +SKIP
        412.5
    """

    def __init__(self, parts: Parts) -> None:
        """Prepare the measurements of a run that is not private; nothing runs yet."""
        self._parts = parts
        self._sharded = any(isinstance(p, DTensor) for p in parts.module.parameters())
        self._objective = parts.module if self._sharded else Objective(parts.model)
        """Model and cross entropy without DDP, whose reducer would wait for processes that a proof refuses."""
        self._refused = False

    def observe(self, batch: StepBatch, attempt: int, log: RunLog) -> None:
        """Measure on a step's batch, for the line of metrics of an attempt; ill layers are an event.

        A model that cannot be measured is an event too, and later calls do nothing.
        """
        if self._refused:
            return
        try:
            log.observed[attempt] = numbers = self.measure(batch)
        except GramianError as problem:
            self._refused = True
            log.event({"event": "not_observed", "text": f"noise scale and layer health: {problem}"})
            return
        if problems := problems_of(numbers["layers"]):
            log.event({"event": "unhealthy", "problems": problems})

    def measure(self, batch: StepBatch) -> dict[str, Any]:
        """Noise scale of the cross entropy of a step's windows, and health of the layers, over all processes (collective).

        Returns:
            {"noise_scale": tr Σ/|G|² of the windows' gradients; "noise_trace", "noise_signal": unbiased estimates of tr Σ and
            |G|²; "layers": {layer: root mean square "input" and "gradient", share of "zeros" in the input, number of values
            that are "nonfinite"}}. The scale is None where |G|² is lost in the noise of the batch: its estimate is below 0.

        Raises:
            GramianError: on all processes, if one cannot tell the gradients of its windows apart.
        """
        parts, noise, health = self._parts, NoiseScale(), Health()
        grid, problem = parts.grid, ""
        capture = Capture(
            self._objective,
            noise,
            health,
            loss_reduction=grid.size / parts.config.data.batch,
            loss_scale=parts.stepper.scaler or 1.0,
        )
        try:
            if parts.teaching is not None and self._sharded:
                raise GramianError("run.observe_every: the loss of a sharded student bypasses its head; expected 0")
            with _eager(parts.config.compile.mode != "off"), capture:
                self._backward(batch, capture)
        except GramianError as error:
            problem = str(error)
        finally:
            parts.module.zero_grad(set_to_none=True)
        if grid.most(float(bool(problem))):
            raise GramianError(problem or "another process could not tell its windows apart")
        sums = [capture.sums(statistic) for statistic in (noise, health)]
        if grid.size > 1:
            sums = [all_reduce(each, None) for each in sums]
        sums[0][SAMPLES].fill_(parts.config.data.batch)  # rows that fill a process's last micro-batch are no windows
        found, layers = noise.finish(sums[0]), health.finish(sums[1])
        numbers = {
            "noise_scale": found.unbiased,
            "noise_trace": found.trace_covariance,
            "noise_signal": found.squared_gradient,
        }
        if not found.squared_gradient > 0:
            numbers["noise_scale"] = math.nan
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**finite, "layers": {name: _facts(layer) for name, layer in layers.items()}}

    def _backward(self, batch: StepBatch, capture: Capture) -> None:
        """Forward and backward of the cross entropy of all micro-batches, with the random numbers of the step.

        Positions without a target, such as padding, do not count in the layers' health.
        """
        parts, scaler = self._parts, self._parts.stepper.scaler
        coefficient = parts.grid.size / max(1, batch.tokens)
        for i, micro in enumerate(batch.micro):
            seed_all(parts.config.run.seed, batch.position, i, parts.grid.rank)
            capture.next(token_weights=(micro["targets"] != IGNORED).double())
            with parts.numbers.autocast():
                loss, _ = self._objective(micro["tokens"], micro["targets"], coefficient, micro.get("documents"))
            (loss if scaler is None else scaler.scale(loss)).backward()


def problems_of(layers: dict[str, dict[str, Any]]) -> list[str]:
    """A line of text for each layer whose input is all zeros, that gets no gradient, or whose values are not all finite."""
    found = []
    for name, layer in layers.items():
        if layer["nonfinite"]:
            found.append(f"{name}: {layer['nonfinite']:,} values are not finite")
        elif layer["zeros"] == 1.0:
            found.append(f"{name}: its input is all zeros")
        elif layer["gradient"] == 0.0:
            found.append(f"{name}: gets no gradient")
    return found


def _facts(layer: LayerHealth) -> dict[str, Any]:
    """The health of a layer as JSON values; None for what an input of indices does not have."""
    numbers = {"input": layer.activation_norm, "zeros": layer.zero_fraction, "gradient": layer.gradient_norm}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {**finite, "nonfinite": layer.nonfinite}


def _eager(compiled: bool) -> AbstractContextManager[Any]:
    """Context manager in which compiled models run eagerly; empty if the model is not compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
