"""Runs of a user's model for `gramian.check`: the batch and its samples alone, with and without gramian.

Every run begins in the same state: random generators, buffers, and Python attributes of modules.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.persist import curvature_record
from gramian.linalg.wide import wide
from gramian.privacy import PrivacyEngine
from gramian.statistics import per_sample_norms
from gramian.taps.model.dropout import WithoutDropout
from gramian.taps.model.preserve_state import InitialState
from gramian.taps.proof.evaluation_mode import evaluating
from gramian.taps.proof.model_outputs import output_tensors
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.sites.site import first_tensor

MOST = 3
"""Largest number of samples that are run."""
REPEATS = 5
"""Number of forwards with other random numbers that must have the same outputs for a model that draws some."""
SMOOTH = "a smooth loss of the model's first output in place of yours (loss=)"
FLOOR = 0.1
"""Errors of a parameter are relative to its own size and this share of all parameters': some gradients, such as those of the
biases of keys in attention, are zero but for rounding."""


class _NoStep(Optimizer):
    """An optimizer whose step changes nothing; the engine's hook has then left the private gradient in `p.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Remainder:
    """What is left of a gradient after terms f_i g_i were subtracted, and the sizes Σ_i |f_i| ‖g_i‖, parameter by parameter."""

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        """Begin with copies of the gradients, in float32 or float64."""
        self._left = [None if g is None else wide(g).clone() for g in gradients]
        self._sizes = [0.0] * len(gradients)
        self._begin = math.hypot(*(_norm(g) for g in self._left if g is not None))

    def subtract(self, gradients: Sequence[Tensor | None], norms: Sequence[float], factor: float = 1.0) -> None:
        """Subtract factor · g for the gradient g, of these norms, of each parameter."""
        for i, (g, norm) in enumerate(zip(gradients, norms, strict=True)):
            self._sizes[i] += factor * norm
            if g is not None:
                left = self._left[i]
                self._left[i] = -factor * wide(g) if left is None else left.sub_(wide(g), alpha=factor)

    def errors(self) -> list[float]:
        """‖rest‖ / (size + FLOOR · size of all) of each parameter; infinite where it is not a number."""
        floor = FLOOR * max(math.hypot(*self._sizes), self._begin) + 1e-30
        left = [0.0 if rest is None else _norm(rest) for rest in self._left]
        found = [rest / (size + floor) for rest, size in zip(left, self._sizes, strict=True)]
        return [math.inf if math.isnan(error) else error for error in found]


class ModelRuns:
    """A model with up to three samples of a batch, and the runs that are made of them."""

    def __init__(self, root: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> None:
        """Find the samples of the batch.

        Raises:
            GramianError: if the batch is of another type or has fewer than two different samples.
        """
        self.root, self.loss, self.mean = root, loss, False
        self._takes = [*inspect.signature(root.forward).parameters.values()]
        given = dict(batch) if isinstance(batch, Mapping) else batch
        if not isinstance(given, Tensor | tuple | list | dict):
            raise GramianError(f"batch: expected a tensor, a tuple, a list or a mapping, got {type(batch).__name__}")
        first = first_tensor(*self._arguments(given))
        self.batch = first.shape[0] if first.dim() else 0
        self.count = min(MOST, self.batch)
        if self.count < 2:
            raise GramianError(f"batch: has {self.batch} samples on axis 0; expected at least two")
        whole = SampleArguments.of(given, self.batch)
        self.samples = self._first(whole)
        ambiguous = whole.ambiguous(strict=True)
        self._other = self._first(replace(whole, rows=[0 if i in ambiguous else k for i, k in enumerate(whole.rows)]))
        if len(set(self.samples.contents())) < 2:
            raise GramianError(f"batch: its first {self.count} samples are equal; expected samples that differ")
        self._everyone = range(self.count)
        named = [(name, p) for name, p in unique_parameters(root) if p.requires_grad]
        self.names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self.unused: list[str] = []
        """Names of trained parameters that got no gradient."""
        self.mode = ""
        """Mode of the comparisons, as text; "": the user's own."""
        self._quiet: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.repeats = True
        """False if outputs are random even in evaluation mode, so that no sample alone can repeat the batch."""
        self._output = 0
        self._state = InitialState(root, self.samples.leaves)

    def _first(self, samples: SampleArguments) -> SampleArguments:
        leaves = samples.spec.flatten_up_to(samples.take(range(self.count)))
        return replace(samples, leaves=leaves, batch=self.count)

    def prepare(self) -> None:
        """Run the batch and a sample; find the mode in which nothing is random, the output of the loss, and its reduction."""
        readings = (self.samples, self._other)  # a mask [T, T] may look like samples
        for self.samples in readings:
            with suppress(Exception):
                self._choose_mode()
                with self._quiet():
                    self._forward([0])
                break
        else:
            self.samples = readings[0]
            self._choose_mode()
        if self.loss is not None:
            self.mean = self._is_mean()
            return
        fit = [y.dim() > 0 and y.shape[0] % self.count == 0 for y in self._outputs]
        if not any(fit):
            raise GramianError(f"outputs: none is of floating point with {self.count} rows; expected one, or loss=")
        self._output = fit.index(True)

    def _choose_mode(self) -> None:
        """Choose the mode nearest to the user's in which the outputs do not depend on random numbers."""
        for mode, quiet in (
            ("", nullcontext),
            ("dropout off", WithoutDropout),
            ("evaluation mode, dropout off", partial(evaluating, self.root)),
        ):
            self.mode, self._quiet = mode, quiet
            self._state.restore()
            with quiet():
                self._outputs = [y.detach() for y in output_tensors(self._forward(self._everyone)[0])]
            if not self._state.drew:
                return
        for _ in range(REPEATS):  # some models draw numbers in evaluation mode that they do not use
            with self._state.advanced(), quiet():
                self._state.restore()
                again = output_tensors(self._forward(self._everyone)[0])
            if not all(map(torch.equal, self._outputs, again)):
                break
        else:
            return
        self.mode, self._quiet, self.repeats = "", nullcontext, False

    def _is_mean(self) -> bool:
        """True if the loss is one number, and nearer to the mean of what it is for each sample than to their sum."""
        with self._quiet():
            losses = self._loss_of(self._everyone)
            if losses.numel() > 1:
                return False
            with suppress(Exception):  # a sample may not run alone
                whole, total = losses.item(), sum(self._loss_of([i]).item() for i in self._everyone)
                return abs(whole - total / self.count) < abs(whole - total)
        return False

    # ---- one run ---------------------------------------------------------------------------------------------------

    def _arguments(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(positional, keyword) arguments of the forward in a batch; with a loss, only those that it has parameters for."""
        if isinstance(given, Tensor):
            return (given,), {}
        kinds = {p.kind for p in self._takes}
        if isinstance(given, dict):
            names = {p.name for p in self._takes}
            takes_all = self.loss is None or inspect.Parameter.VAR_KEYWORD in kinds
            return (), {name: value for name, value in given.items() if takes_all or name in names}
        takes_all = self.loss is None or inspect.Parameter.VAR_POSITIONAL in kinds
        positional = [p for p in self._takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return tuple(given if takes_all else given[: len(positional)]), {}

    def _forward(self, source: Sequence[int]) -> tuple[Any, Any]:
        """(outputs, batch) of the samples with these numbers."""
        given = self.samples.take(source)
        args, kwargs = self._arguments(given)
        return self.root(*args, **kwargs), given

    def _loss_of(self, source: Sequence[int]) -> Tensor:
        self._state.restore()
        outputs, given = self._forward(source)
        if self.loss is None:
            y_BN = wide(output_tensors(outputs)[self._output].reshape(len(source), -1))
            w_N = torch.randn(y_BN.shape[1], generator=torch.Generator().manual_seed(0)).to(y_BN)
            found = (w_N * y_BN + 0.05 * y_BN.square()).sum(1) / y_BN.shape[1] ** 0.5
        else:
            found = self.loss(outputs, given)
        if not isinstance(found, Tensor):
            raise GramianError(
                f"loss: returned {type(found).__name__}; expected a tensor, one number per sample or their sum"
            )
        return found

    def _total(self, source: Sequence[int]) -> Tensor:
        """Sum of the losses of the samples with these numbers."""
        return self._loss_of(source).sum() * (len(source) if self.mean else 1)

    def _gradients(self, source: Sequence[int]) -> tuple[list[Tensor | None], list[float]]:
        """Gradients of all trained parameters, None for unused ones, and their norms; without gramian."""
        with self._quiet():
            found = torch.autograd.grad(self._total(source), self._parameters, allow_unused=True)
        dense: list[Tensor | None] = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        return dense, [0.0 if g is None else _norm(wide(g)) for g in dense]

    # ---- comparisons -----------------------------------------------------------------------------------------------

    def batch_gradient(self) -> Remainder:
        """Gradient of the batch, without gramian; names of parameters that have none go into `unused`."""
        gradients, _ = self._gradients(self._everyone)
        self.unused = [name for name, g in zip(self.names, gradients, strict=True) if g is None]
        return Remainder(gradients)

    def compare_with_alone(self, rest: Remainder) -> tuple[float, Tensor]:
        """(largest error of the batch's gradient against Σ_i g_i, norms ‖g_i‖ of the samples alone)."""
        norms = []
        for i in self._everyone:
            alone, sizes = self._gradients([i])
            rest.subtract(alone, sizes)
            norms.append(math.hypot(*sizes))
        return max(rest.errors()), torch.tensor(norms, dtype=torch.float64)

    def changed_outputs(self, tolerance: float) -> str:
        """Text about the first output of a sample that is another one when it runs alone; "" if none is."""
        with self._quiet():
            outputs = []
            for source in (self._everyone, [0]):
                self._state.restore()
                outputs.append(output_tensors(self._forward(source)[0]))
        for number, (whole, alone) in enumerate(zip(*outputs, strict=False)):
            rows = len(whole) // self.count if whole.dim() and not len(whole) % self.count else 0
            if rows and whole[:rows].shape == alone.shape:
                change = _norm(wide(whole[:rows]) - wide(alone)) / max(_norm(wide(alone)), 1e-30)
                if change > tolerance:
                    return f" (output {number} of a sample changes by {change:.2g} of its size when others are there)"
            elif rows:
                return f" (output {number} of a sample has another shape, {list(alone.shape)}, without the others)"
        return ""

    def private(self, limit: float, own_mode: bool = False) -> tuple[Tensor, Remainder]:
        """(norms, private gradient) that `PrivacyEngine` makes of the batch for the clip norm `limit`, without noise.

        `own_mode`: in the mode of the user's model, dropout included, for what is refused there.
        """
        engine, optimizer = PrivacyEngine(insecure_reproducible=True), _NoStep(self._parameters)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "poisson_sampling: is off")
            engine.make_private(
                module=self.root,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=1),
                noise_multiplier=0.0,
                max_grad_norm=limit,
                loss_reduction="sum",
                poisson_sampling=False,
                expected_batch=1.0,
                sample_rate=0.1,
            )
        try:
            with nullcontext() if own_mode else self._quiet():
                engine.backward(self._total(self._everyone))
            assert engine.last is not None
            norms = engine.last.norms_B.double().cpu()
            optimizer.step()
            return norms, Remainder([p.grad for p in self._parameters])
        finally:
            engine.detach()
            for p in self._parameters:
                p.grad = None

    def compare_clipped(self, private: Remainder, norms: Tensor, limit: float) -> list[float]:
        """Errors of a private gradient, parameter by parameter, against Σ_i min(1, C/‖g_i‖) g_i with C = `limit`."""
        for i in self._everyone:
            alone, sizes = self._gradients([i])
            private.subtract(alone, sizes, min(1.0, limit / max(float(norms[i]), 1e-30)))
        return private.errors()

    def captured_norms(self, own_mode: bool = False) -> Tensor:
        """Per-sample norms of a backward of the batch, as `gramian.per_sample_norms` captures them; `own_mode` as above."""
        with nullcontext() if own_mode else self._quiet(), per_sample_norms(self.root, "sum") as norms:
            self._total(self._everyone).backward()
        return norms.values.double().cpu()

    def kfac_kinds(self) -> tuple[dict[str, str], dict[str, str]]:
        """{parameter: "kronecker", "block", "diagonal" or "none"} of a K-FAC capture, and {parameter: why, in parentheses}.

        Raises:
            GramianError: if K-FAC refuses the model.
        """
        kfac, was_silent = KFACNaturalGradient(), curvature_record.logger.disabled
        curvature_record.logger.disabled = True  # what it would say is in the findings
        try:
            with kfac.capture(self.root, loss_reduction="sum", num_terms=float(self.count)):
                self._total(self._everyone).backward()
        finally:
            curvature_record.logger.disabled = was_silent
        if kfac.dropped:
            raise GramianError(str(kfac.dropped[0]["reason"]))
        names = {"K-FAC": "kronecker", "exact block": "block", "diagonal": "diagonal"}
        covers = {name: kfac.coverage[name].algorithm for name in self.names}
        kinds = {
            name: next((kind for start, kind in names.items() if text.startswith(start)), "none")
            for name, text in covers.items()
        }
        return kinds, {name: text.removeprefix("diagonal") for name, text in covers.items()}


def _norm(t: Tensor) -> float:
    return float(t.detach().square().sum().sqrt())
