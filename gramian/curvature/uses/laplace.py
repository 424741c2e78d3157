"""The Laplace approximation: a Gaussian over the parameters around a trained model, from its Fisher.

With n loss terms in the data and a prior N(μ, τ⁻¹I), the posterior is N(θ, (n F + τI)⁻¹), F the Fisher of one term. Since
n F + τI = n (F + λI) with λ = τ/n, a sample is θ + n^(-1/2) (F + λI)^(-1/2) ε with white noise ε.

Here λI is added to the product G ⊗ A of a layer, in the eigenbasis of both sides, whatever `damping_mode` the Fisher has for
its other uses, and nothing is clipped: the covariance is that of the formula. Under "pi" or "factored" damping it would be
that of (G + λ_G I) ⊗ (A + λ_A I), which has τ in name only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import whole
from gramian.curvature.blocks.consistency import check_number, check_vector
from gramian.curvature.blocks.damping import Damping
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import blocks_of, covered_parameters, parameters_of
from gramian.linalg.wide import exact_float32, wide, wide_dtype


@dataclass(frozen=True)
class LogMarginal:
    """log p(data) ≈ the sum of four pieces; larger is better."""

    log_likelihood: float
    """log p(data | θ), as it was handed in."""
    prior_quadratic: float
    """−½ τ ‖θ − μ‖²."""
    prior_log_det: float
    """½ log det(τI) = ½ P log τ."""
    posterior_log_det: float
    """−½ log det(n F + τI)."""
    parameters: int
    """P: entries of the parameters that have curvature; others have no part in any piece."""
    error: float = 0.0
    """What posterior_log_det may be off by, where a side is too wide for its exact spectrum."""

    @property
    def total(self) -> float:
        """All four."""
        return self.log_likelihood + self.log_occam

    @property
    def log_occam(self) -> float:
        """All but the likelihood: what the model pays for the parameters that it had to fix."""
        return math.fsum([self.prior_quadratic, self.prior_log_det, self.posterior_log_det])


class Laplace:
    """N(θ, (n F + τI)⁻¹) around a model as it is when this is made.

    ```python
    posterior = Laplace(kfac, model, n=50_000, prior_precision=1.0)
    weights = posterior.sample(torch.Generator().manual_seed(0))
    predictions = torch.func.functional_call(model, weights, x)
    ```

    Several processes that hold one Fisher together all do the same with it, with generators of one state.
    """

    def __init__(self, kfac: KFACNaturalGradient, model: nn.Module, n: float, prior_precision: float) -> None:
        """Take the means.

        Args:
            kfac: the Fisher of one loss term; its own damping and clip take no part.
            model: θ is copied. Parameters without curvature have no distribution: they are in no sample, and stay.
            n: loss terms in the data that the posterior is of (tokens, for a language model).
            prior_precision: τ.

        Raises:
            GramianError: if there is no Fisher, it is another model's, or a number is not above 0.
        """
        for name, value in {"n": n, "prior_precision": prior_precision}.items():
            check_number(name, value)
            if not value > 0:
                raise GramianError(f"{name}: expected a number above 0, got {value!r}")
        covered = covered_parameters(kfac)
        there = parameters_of(model, covered)
        self.kfac, self.n, self.prior_precision = kfac, float(n), float(prior_precision)
        self.mean = {name: whole(there[name].detach()).clone() for name in covered}
        """θ, {parameter: tensor} of those that have curvature."""
        self.fixed = [name for name, p in there.items() if p.requires_grad and name not in self.mean]
        """Trained parameters without curvature."""

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of the parameters, {parameter: tensor}, like θ in dtype and device.

        Cost: eigenvectors of both sides of every layer once, then 4·o·m·(r_A + r_G) FLOPs a layer.

        Args:
            generator: of the noise, on any device; float32 and float64 models draw different numbers.

        Raises:
            GramianError: if it is no generator.
        """
        if not isinstance(generator, torch.Generator):
            raise GramianError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
        white = {
            name: torch.randn(mean.shape, generator=generator, dtype=wide_dtype(mean), device=generator.device)
            for name, mean in self.mean.items()
        }
        step = self.scaled({name: noise.to(self.mean[name].device) for name, noise in white.items()})
        return {name: (wide(mean) + step[name]).to(mean.dtype) for name, mean in self.mean.items()}

    def scaled(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(n F + τI)^(-1/2) v: noise of unit covariance becomes noise of the posterior's.

        Args:
            vector: {parameter: tensor} of every parameter that has curvature.

        Raises:
            GramianError: if one is missing, or has another shape.
        """
        check_vector("vector", vector)
        missing = next((name for name in self.mean if name not in vector), None)
        if missing is not None:
            raise GramianError(f"vector: lacks {missing}; expected every parameter that has curvature")
        value = self.prior_precision / self.n
        damping, found = Damping("joint", value, value, 1.0, None), {}
        with torch.no_grad(), exact_float32():
            for block in blocks_of(self.kfac).values():
                y_OM = block.spec.matrix({name: wide(vector[name].detach()) for name in block.spec.parameters})
                y_OM = y_OM.to(torch.promote_types(y_OM.dtype, block.G.dtype))
                out_OM = block.power(y_OM, -0.5, damping, self.kfac.options.kfac_eps) / self.n**0.5
                found.update(block.spec.tensors(out_OM))
        return {name: found[name].to(wide(vector[name])) for name in self.mean}

    def log_marginal(self, log_likelihood: float, prior_mean: Mapping[str, Tensor] | None = None) -> LogMarginal:
        """The pieces of log p(data) ≈ log p(data | θ) − ½τ‖θ − μ‖² + ½ P log τ − ½ log det(n F + τI).

        Cost: the eigenvalues of both sides of every layer, then o·m logarithms a layer.

        Args:
            log_likelihood: log p(data | θ), the sum over all n terms: minus the summed cross entropy.
            prior_mean: μ, {parameter: tensor}; None, and what is missing: 0.

        Raises:
            GramianError: if it is no number.
        """
        check_number("log_likelihood", log_likelihood)
        prior_mean = {} if prior_mean is None else prior_mean
        check_vector("prior_mean", prior_mean)
        strange = next((name for name in prior_mean if name not in self.mean), None)
        if strange is not None:
            raise GramianError(f"prior_mean: {strange} has no curvature; expected names of parameters that do")
        for name, center in prior_mean.items():
            if center.shape != self.mean[name].shape:
                got, wanted = list(center.shape), list(self.mean[name].shape)
                raise GramianError(f"prior_mean: {name} has shape {got}; expected {wanted}, as the parameter")
        squares = 0.0
        for name, mean in self.mean.items():
            away = mean.double() - prior_mean[name].to(mean.device).double() if name in prior_mean else mean.double()
            squares += float(away.square().sum())
        size, tau = sum(mean.numel() for mean in self.mean.values()), self.prior_precision
        of_one_term = self.kfac.compute_capacity_metrics(damping=tau / self.n)["model"]
        return LogMarginal(
            log_likelihood=float(log_likelihood),
            prior_quadratic=-0.5 * tau * squares,
            prior_log_det=0.5 * size * math.log(tau),
            posterior_log_det=-0.5 * (of_one_term["log_det"] + size * math.log(self.n)),
            parameters=size,
            error=0.5 * of_one_term.get("error", {}).get("log_det", 0.0),
        )
