"""One step of private training: checks around its backwards, then noise and division before the optimizer acts.

A hook in front of the optimizer's step sets p.grad = (Σ_i c_i g_i + σ·C·z) / expected batch, with clip factors c_i, gradients
g_i, noise multiplier σ, sensitivity C and standard normal noise z. The sum is over the micro-batches of one Poisson draw and
over all processes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.parallel.shared_refusals import SharedRefusals
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.audit.bypass import OutsideParameters
from gramian.privacy.clipping.clip_factors import ClipFunction, ClippedBatch
from gramian.privacy.clipping.clipping_rule import Clipping
from gramian.privacy.clipping.gradient_sums import GradientSums
from gramian.privacy.clipping.loss_scaling import scaling_at
from gramian.privacy.clipping.private_quantile import PrivateQuantile
from gramian.privacy.clipping.single_sample_clipping import SingleSampleClipping
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noise_strategy import NoiseStrategy
from gramian.privacy.options import PrivacyOptions, SamplingRate
from gramian.privacy.sampling.draw_progress import DrawProgress
from gramian.privacy.sampling.poisson import Piece


class PrivateStep:
    """Checks the backwards of a step and releases its noised sum; one object serves all steps of a private model."""

    def __init__(
        self,
        options: PrivacyOptions,
        rate: SamplingRate,
        trained: Mapping[str, nn.Parameter],
        sums: GradientSums,
        clipping: Clipping | SingleSampleClipping,
        outside: OutsideParameters,
        ledger: Ledger,
        stopwatch: Stopwatch,
        clip: ClipFunction,
        quantile: PrivateQuantile | None,
        metric: PublicMetric | None,
        strategy: NoiseStrategy | None,
        refusals: SharedRefusals,
    ) -> None:
        """Store the parts; `clipping` computes the clipped sums of each backward and adds them to `sums`.

        `clip` says how large they are, and with "adaptive" `quantile` changes it with every release. Norms are measured, and
        noise is drawn, in the `metric`, if there is one. `strategy` correlates the noise; None: nothing does.
        """
        self._clip, self._quantile = clip, quantile
        self._metric, self._strategy, self._refusals = metric, strategy, refusals
        self._options, self._rate, self._trained, self._outside = options, rate, dict(trained), outside
        self._sums, self._clipping, self._ledger, self._stopwatch = sums, clipping, ledger, stopwatch
        self.on_clipped: Callable[[ClippedBatch], None] = lambda clipped: None
        """Called after every backward with the norms and clip factors of its samples."""
        self.stepped = False
        """True if the last step released a noised sum; False after a micro-batch that is not the last of its draw."""
        self.restart()

    def restart(self) -> None:
        """Drop the sums of the draw under way, and use the ledger's present noise key from now on."""
        shapes = [(name, tuple(p.shape)) for name, p in self._trained.items()]
        plan = NoisePlan(self._ledger.secrets.noise_key, shapes)
        self.noise = plan if self._strategy is None else CorrelatedNoise(plan, self._strategy)
        self.progress = DrawProgress()
        self._forget()

    def _forget(self) -> None:
        """Drop what is to be released of the draw under way."""
        self._sums.forget()
        if self._quantile is not None:
            self._quantile.forget()
        if self._metric is not None:
            self._metric.end_draw()

    def begin_piece(self, piece: Piece) -> None:
        """Begin a piece (micro-batch) of a Poisson draw, whose batch the loader yields now.

        Raises:
            GramianError: if an earlier draw was summed and no optimizer step released it.
        """
        if self.progress.begin(piece):
            self._forget()

    def before_backward(self, rows: int, units: int | None) -> None:
        """Check a backward of `rows` rows, which belong to so many `units` (None: each is one), before anything is summed.

        Raises:
            GramianError: if a parameter outside the engine would get a gradient, if weights changed since the last backward of
                this step, if `rows` exceeds max_physical_batch, or if the loader's batch had a backward before or another
                number of records.
        """
        self._outside.refuse()
        if self._metric is not None:
            self._metric.begin_draw()
        self._sums.begin()
        limit = self._options.max_physical_batch
        if limit is not None and rows > limit:
            raise GramianError(
                f"max_physical_batch: is {limit}, and a backward has {rows} samples; expected batches of at most as many "
                "(without Poisson sampling the loader does not split them)"
            )
        if self._options.poisson_sampling:
            self.progress.check_backward(rows, units)

    def after_backward(self) -> None:
        """Count a backward whose clipped sums were added, and report its norms to `on_clipped`."""
        if self._clipping.last is not None:
            self.on_clipped(self._clipping.last)
            if self._quantile is not None:
                self._quantile.count(self._clipping.last.norms_B)
        self.progress.end_backward()

    def hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Optimizer pre-step hook: run the closure, if any, add noise to the sums, and set `p.grad`.

        Returns:
            None without a closure; otherwise the arguments of the step, whose closure returns the loss already computed.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            with self._refusals.told():
                self._before_step(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()
        with self._refusals.told():
            self._before_step(optimizer)
        return (args[0], *args[2:]), {**kwargs, "closure": _once(loss)}

    def _before_step(self, optimizer: Optimizer) -> None:
        """Add noise and divide; for a micro-batch that is not the last of its Poisson draw, only set its sum aside."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if stepped != {id(p) for p in self._trained.values()}:
            raise GramianError(
                "optimizer: its trained parameters are not those of make_private; expected detach() and make_private again"
            )
        noise = self._options.noise_multiplier
        if getattr(optimizer, "noise_multiplier", noise) != noise:
            raise GramianError(
                f"noise_multiplier: was set on the optimizer, and this run was begun with {noise:g}; expected detach() and "
                "make_private(noise_multiplier=…) for another"
            )
        self._clipping.recover()
        scaling = scaling_at(optimizer, self._options.loss_scale)
        poisson = self._options.poisson_sampling
        ends = not poisson or self.progress.ends_draw(self._ledger.counter.released)
        if ends:
            self._reserve()
        self._refusals.meet("an optimizer step")
        if not ends:
            unchanged = self._sums.compare(scaling)
            self._sums.move(scaling)
            self.stepped = False
            unchanged()
            return
        unchanged = self._sums.compare(scaling)
        if self._metric is not None:
            self._metric.agree()
        number = self._ledger.begin()
        self.progress.passes_since_step = 0
        options = self._options
        with torch.no_grad(), self._stopwatch.time("step", cuda=next(iter(self._trained.values())).is_cuda):
            sigma = options.noise_multiplier if self._quantile is None else self._quantile.noise_multiplier
            std = sigma * self._clip.sensitivity
            self._sums.release(self.noise, number, std, self._rate.expected_batch, scaling, self._metric)
            if self._metric is not None:
                self._metric.end_draw()
            if self._quantile is not None:
                key, device = self._ledger.secrets.subkey("quantile"), next(iter(self._trained.values())).device
                self._ledger.clip_norm = self._quantile.release(key, number, device)
        self.progress.clear()
        self.stepped = False
        unchanged()
        self.stepped = True
        self._stopwatch.step += 1

    def _reserve(self) -> None:
        """Whatever may refuse a release on one process alone, before the processes meet and any of them begins it."""
        if not self._options.poisson_sampling and not self._rate.given:
            self._account_for_backwards()
        if self._metric is not None:
            self._metric.begin_draw()  # of a draw without a sample
        try:
            self._ledger.refuse_past_limit()
        except GramianError:
            self._forget()  # it has no noise
            raise
        self._ledger.reserve()

    def _account_for_backwards(self) -> None:
        """Without Poisson sampling, multiply the sample rate of a step by the number of batches that were summed in it.

        Of processes with different numbers, the largest counts.

        Raises:
            GramianError: with the accountant "gdp", if the rate differs from that of earlier steps.
        """
        rate = min(1.0, self._rate.sample_rate * self._refusals.most(max(1, self.progress.passes_since_step)))
        accounting = self._ledger.accounting
        if accounting.mechanism == "gdp" and self._ledger.counter.spent and accounting.history[-1][1] != rate:
            raise GramianError(
                "accountant: gdp composes steps of one kind, and this one has another number of backwards than the last; "
                "expected as many in each, or prv or rdp"
            )
        accounting.record(self._options.noise_multiplier, rate)


def _once(loss: Any) -> Callable[[], Any]:
    """A closure for the optimizer that returns the loss already computed; a second call raises a `GramianError`."""
    given = iter((loss,))

    def closure() -> Any:
        for value in given:
            return value
        raise GramianError(
            "closure: the optimizer calls it twice in one step; expected an optimizer with one backward a step"
        )

    return closure
