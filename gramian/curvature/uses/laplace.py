"""The Laplace approximation: a Gaussian over the parameters around a trained model, from its Fisher.

With n loss terms in the data and a prior N(μ, τ⁻¹I), the posterior is N(θ, (n F + τI)⁻¹), F the Fisher of one term. Since
n F + τI = n (F + λI) with λ = τ/n, a sample is θ + n^(-1/2) (F + λI)^(-1/2) ε with white noise ε.

λI is added to the product G ⊗ A of a layer, in the eigenbasis of both sides, whatever `damping_mode` the Fisher has, and
nothing is clipped, so the covariance is that of the formula. "pi" or "factored" damping would give (G + λ_G I) ⊗ (A + λ_A I),
which is not a posterior with prior precision τ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import full_vector
from gramian.curvature.blocks.consistency import check_number, check_vector
from gramian.curvature.blocks.damping import Damping
from gramian.curvature.blocks.parameter_parts import ParameterParts
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import blocks_of, fisher_parameters, parameters_of, parts_source
from gramian.linalg.wide import exact_float32, wide


@dataclass(frozen=True)
class LogMarginal:
    """The four terms of the Laplace approximation of log p(data); a larger sum is better."""

    log_likelihood: float
    """log p(data | θ), as the user gave it."""
    prior_quadratic: float
    """−½ τ ‖θ − μ‖², with prior mean μ and precision τ."""
    prior_log_det: float
    """½ log det(τI) = ½ P log τ, with prior precision τ and P parameters."""
    posterior_log_det: float
    """−½ log det(n F + τI), with n loss terms, Fisher F and prior precision τ."""
    parameters: int
    """P: number of entries of the parameters that have a Fisher block; other parameters are in no term."""
    error: float = 0.0
    """Bound on the error of `posterior_log_det`, where a factor is too wide for its exact spectrum; else 0."""

    @property
    def total(self) -> float:
        """The approximation of log p(data): the sum of the four terms."""
        return self.log_likelihood + self.log_occam

    @property
    def log_occam(self) -> float:
        """The log of the Occam factor: the sum of all terms but the likelihood."""
        return math.fsum([self.prior_quadratic, self.prior_log_det, self.posterior_log_det])


class Laplace:
    """The posterior N(θ, (n F + τI)⁻¹) around a model's current parameters θ: n loss terms, Fisher F, prior precision τ.

    ```python
    posterior = Laplace(kfac, model, n=50_000, prior_precision=1.0)
    weights = posterior.sample(torch.Generator().manual_seed(0))
    predictions = torch.func.functional_call(model, weights, x)
    ```

    Processes that share one Fisher must all make the same calls, with generators of equal state.
    """

    def __init__(self, kfac: KFACNaturalGradient, model: nn.Module, n: float, prior_precision: float) -> None:
        """Copy the model's parameters as means of the posterior.

        Args:
            kfac: the Fisher of one loss term, which must not be refreshed any more; its own damping and clip are not used.
            model: θ is copied. Parameters without a Fisher block have no distribution and are in no sample.
            n: number of loss terms in the data (tokens, for a language model).
            prior_precision: τ > 0, the precision (inverse variance) of the Gaussian prior on every parameter.
        """
        check_number("n", n, "positive")
        check_number("prior_precision", prior_precision, "positive")
        shapes = fisher_parameters(kfac)
        parameters = parameters_of(model, shapes)
        self.kfac, self.n, self.prior_precision = kfac, float(n), float(prior_precision)
        self._blocks = kfac.kfac_factors
        self.mean = {name: full_vector(parameters[name].detach()).clone() for name in shapes}
        """Means of the posterior: {parameter: tensor} for the parameters that have a Fisher block."""
        self.fixed = [name for name, p in parameters.items() if p.requires_grad and name not in self.mean]
        """Names of trained parameters without a Fisher block, which have no distribution."""

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the parameters once from the posterior: {parameter: tensor}, with the dtypes and devices of the means θ.

        Cost: eigenvectors of A and G of every layer once, then 4·o·m·(r_A + r_G) FLOPs for a weight [o, m] with r_A and r_G
        eigenvectors.

        Args:
            generator: the generator of the noise, on any device; float32 and float64 models draw different numbers.
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
        """(n F + τI)^(-1/2) v, which turns white noise v into noise with the posterior's covariance.

        Args:
            vector: {parameter: tensor} of every parameter that has a Fisher block; a missing one raises a GramianError.

        Returns:
            {parameter: tensor} of the same parameters, in float32 or float64.
        """
        check_vector("vector", vector)
        self._refuse_other_factors()
        missing = next((name for name in self.mean if name not in vector), None)
        if missing is not None:
            raise GramianError(f"vector: lacks {missing}; expected every parameter that has curvature")
        value = self.prior_precision / self.n
        damping, found = Damping("joint", value, value, 1.0, None), {}
        parts = ParameterParts.of(parts_source(self.kfac))
        each = parts.split({name: wide(vector[name].detach()) for name in self.mean})
        with torch.no_grad(), exact_float32():
            for block in blocks_of(self.kfac).values():
                y_OM = block.spec.matrix(each)
                y_OM = y_OM.to(torch.promote_types(y_OM.dtype, block.G.dtype))
                out_OM = block.power(y_OM, -0.5, damping, self.kfac.options.kfac_eps) / self.n**0.5
                found.update(block.spec.tensors(out_OM))
        prior = value**-0.5 / self.n**0.5  # of parts that no data has reached
        found = parts.join({name: found.get(name, t * prior) for name, t in each.items()})
        return {name: found[name].to(wide(vector[name])) for name in self.mean}

    def log_marginal(self, log_likelihood: float, prior_mean: Mapping[str, Tensor] | None = None) -> LogMarginal:
        """The terms of log p(data) ≈ log p(data | θ) − ½τ‖θ − μ‖² + ½ P log τ − ½ log det(n F + τI), P parameters.

        Cost: the eigenvalues of A and G of every layer, then o·m logarithms for a weight [o, m].

        Args:
            log_likelihood: log p(data | θ), the sum over all n terms: minus the summed cross entropy.
            prior_mean: μ, {parameter: tensor}; None and missing parameters: 0.
        """
        check_number("log_likelihood", log_likelihood)
        self._refuse_other_factors()
        prior_mean = {} if prior_mean is None else prior_mean
        check_vector("prior_mean", prior_mean)
        unknown = next((name for name in prior_mean if name not in self.mean), None)
        if unknown is not None:
            raise GramianError(f"prior_mean: {unknown} has no curvature; expected names of parameters that do")
        for name, center in prior_mean.items():
            if center.shape != self.mean[name].shape:
                got, wanted = list(center.shape), list(self.mean[name].shape)
                raise GramianError(f"prior_mean: {name} has shape {got}; expected {wanted}, as the parameter")
        squares = 0.0
        for name, mean in self.mean.items():
            offset = mean.double() - prior_mean[name].to(mean.device).double() if name in prior_mean else mean.double()
            squares += float(offset.square().sum())
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

    def _refuse_other_factors(self) -> None:
        """Raise a GramianError if the Fisher is not that of the means any more."""
        if self.kfac.kfac_factors is not self._blocks:
            raise GramianError(
                "kfac: was refreshed or loaded after Laplace took the parameters; expected an object of its own"
            )
