"""The curvature analysis: K-FAC and its metrics, then products with the Gauss-Newton matrix and, optionally, with the Hessian.

Each stage adds a section to one JSON-able result, which is passed on after every stage, so a later failure loses nothing.
K-FAC's factors are freed before Lanczos allocates its basis: peak memory is that of the most expensive stage.
"""

import math
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gramian.analysis.analysis_plan import AnalysisPlan, make_plan
from gramian.analysis.collect import collect
from gramian.analysis.options import TOLERANCE, Settings
from gramian.analysis.spectrum_curves import ggn_density, kfac_density, layer_spectra
from gramian.analysis.subject import Subject
from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.curvature import GGNOperator, HessianOperator, KFACNaturalGradient
from gramian.linalg import LanczosSpectrum, SpectralDensity, lanczos, spectral_density
from gramian.linalg.spectra.operator import Operator

SCHEMA = 1
Update = Callable[[int, int], None]
"""Progress callback of a stage: called with (units done, units in total)."""
Stage = Callable[[str], AbstractContextManager[Update]]
"""Function that opens a stage by its name: returns a context around the stage, whose value is the progress callback."""
Result = dict[str, Any]


def kfac_of(subject: Subject, settings: Settings) -> KFACNaturalGradient:
    """Make the K-FAC object of an analysis, with the damping of `settings`, in float64 for a float64 model, else float32."""
    return KFACNaturalGradient(
        damping=settings.damping,
        damping_mode="joint",
        woodbury_dtype="fp64" if next(subject.model.parameters()).dtype == torch.float64 else "fp32",
        kfac_true_fisher_head=settings.fisher == "true",
        ekfac=settings.ekfac,
        seed=settings.seed,
    )


def plan_of(subject: Subject, settings: Settings) -> AnalysisPlan:
    """Plan the memory of an analysis of `subject` with `settings`; nothing is allocated.

    Raises:
        GramianError: if more eigenvalues are requested than the model has trained parameters.
    """
    plan = make_plan(subject, settings, kfac_of(subject, settings))
    if settings.eigenvalues > subject.parameters:
        raise GramianError(
            f"eigenvalues: {settings.eigenvalues:,}; expected at most {subject.parameters:,}, one a trained parameter"
        )
    return plan


def analyse(
    subject: Subject,
    settings: Settings,
    stage: Stage = lambda name: nullcontext(lambda done, total: None),
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure the curvature of a model, as in `analyse(subject, Settings(probes=0))["kfac"]["metrics"]`.

    Args:
        subject: the model and its batches.
        settings: what to compute.
        stage: called with a stage's name; returns a context around that stage, whose value is the progress callback.
        keep: called with the result after every stage; its "complete" is true after the last one.

    Returns:
        {"settings", "model", "data", "notes", "versions", "plan", "kfac", "ggn", "hessian", "seconds", "complete"}; see
        docs/how-to/curvature.md.

    Raises:
        GramianError: if the model or the batches do not fit.
    """
    result = _about(subject, settings)
    stages: list[tuple[str, Callable[[Update], Result]]] = [("kfac", lambda update: _kfac(subject, settings, update))]
    if settings.probes:
        stages.append(("ggn", lambda update: _ggn(subject, settings, update)))
    if settings.hessian:
        stages.append(("hessian", lambda update: _hessian(subject, settings, update)))
    for number, (name, run) in enumerate(stages, start=1):
        started = time.perf_counter()
        with stage(name) as update:
            result[name] = run(update)
        result["seconds"][name] = time.perf_counter() - started
        result["complete"] = number == len(stages)
        keep(result)
    return result


def _about(subject: Subject, settings: Settings) -> Result:
    device = next(subject.model.parameters()).device
    cuda = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "complete": False,
        "settings": dict(vars(settings)),
        "model": {**subject.model_facts, "parameters": subject.parameters},
        "data": {**subject.data_facts, "tokens": subject.tokens, "terms": subject.terms},
        "notes": list(subject.notes),
        "versions": {
            "gramian": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if cuda else f"cpu ({platform.machine()})",
        },
        "plan": plan_of(subject, settings).facts(),
        "seconds": {},
    }


# ---- K-FAC -----------------------------------------------------------------------------------------------------------


def _kfac(subject: Subject, settings: Settings, update: Update) -> Result:
    kfac = kfac_of(subject, settings)
    loss = collect(kfac, subject.model, subject.batches, settings.fisher, settings.seed, update)
    metrics = kfac.compute_capacity_metrics(n=settings.samples)
    spectra = layer_spectra(kfac.kfac_factors)
    return {
        "loss": loss,
        "metrics": metrics,
        "top_eigenvalues": kfac.top_eigenvalues(settings.eigenvalues).tolist(),
        "spectra": spectra,
        "density": kfac_density(spectra),
        "record": kfac.record(),
    }


# ---- products --------------------------------------------------------------------------------------------------------


class _Counted(Operator):
    """A matrix operator that wraps another one and reports how many products with vectors it has computed."""

    def __init__(self, operator: Operator, update: Update, total: int) -> None:
        self._operator, self._update, self.total, self.products = operator, update, total, 0
        self.dim, self.dtype, self.device = operator.dim, operator.dtype, operator.device

    def matmat(self, y_NK: Tensor) -> Tensor:
        """The product of the operator's matrix with a matrix of K columns, [N, K]; reports K more products."""
        found = self._operator.matmat(y_NK)
        self.products += y_NK.shape[1]
        self._update(self.products, max(self.total, self.products))
        return found


def _ggn(subject: Subject, settings: Settings, update: Update) -> Result:
    """Largest eigenvalues of the Gauss-Newton matrix by Lanczos; its density, trace and related sums by quadrature."""
    ggn = GGNOperator(subject.model, subject.batches, causal_shift=False)
    operator = _Counted(ggn, update, settings.lanczos_limit + settings.probes * settings.steps)
    extremes = _lanczos(operator, settings.eigenvalues, "LA", settings)
    operator.total = operator.products + settings.probes * settings.steps
    density = spectral_density(operator, settings.probes, settings.steps, generator=_generator(operator, settings))
    return {"dim": ggn.dim, "terms": ggn.num_terms, "extremes": extremes, **_functions(density, settings.damping)}


def _functions(density: SpectralDensity, damping: float) -> Result:
    """Quadrature results of a matrix M: nodes and weights, density per decade, and traces of functions with standard errors.

    Gauss' rule is exact for the trace and tr M². It overestimates x/(x + λ), λ = `damping`, whose even derivatives are
    negative: the effective dimension is an upper bound, and falls with more steps.
    """
    trace = density.trace_of(lambda nodes: nodes.clamp(min=0))
    dimension = density.trace_of(lambda nodes: nodes.clamp(min=0) / (nodes.clamp(min=0) + damping))
    squares = density.trace_of(lambda nodes: nodes.square())
    seen = torch.where(density.nodes_PS > density.rounding, density.weights_PS, 0.0).sum(1)
    return {
        "nodes": density.nodes_PS.tolist(),
        "weights": density.weights_PS.tolist(),
        "resolution": density.rounding,
        "above_resolution": float(seen.mean()),
        "density": ggn_density(density.nodes_PS, density.weights_PS, density.rounding),
        "trace": _estimate(trace.value, trace.standard_error),
        "effective_dimension": {**_estimate(dimension.value, dimension.standard_error), "bound": "upper"},
        "participation_ratio": trace.value**2 / squares.value if squares.value > 0 else 0.0,
        "damping": damping,
        "matvecs": density.matvecs,
    }


def _hessian(subject: Subject, settings: Settings, update: Update) -> Result:
    hessian = HessianOperator(subject.model, "cross_entropy", subject.batches, causal_shift=False)
    operator = _Counted(hessian, update, settings.lanczos_limit)
    return {"dim": hessian.dim, "extremes": _lanczos(operator, settings.eigenvalues, "BE", settings)}


def _lanczos(operator: Operator, k: int, which: Any, settings: Settings) -> Result:
    """The k extreme eigenvalues of an operator and their residual bounds, as JSON values; repeated eigenvalues appear once.

    `which` is "LA" (the largest) or "BE" (both ends).
    """
    found: LanczosSpectrum = lanczos(
        operator,
        k,
        which,
        tol=TOLERANCE,
        max_basis=settings.lanczos_basis,
        max_iterations=settings.lanczos_limit,
        search_copies=False,
        generator=_generator(operator, settings),
    )
    return {
        "which": which,
        "eigenvalues": found.eigenvalues.tolist(),
        "residual_bounds": found.residual_bounds.tolist(),
        "converged": found.converged,
        "smallest": found.smallest,
        "largest": found.largest,
        "rounding": found.rounding,
        "asymmetry": found.asymmetry,
        "matvecs": found.matvecs,
        "tolerance": TOLERANCE,
    }


def _generator(operator: Operator, settings: Settings) -> torch.Generator:
    return torch.Generator(device=operator.device).manual_seed(settings.seed)


def _estimate(value: float, error: float) -> Result:
    return {"value": value, "standard_error": error if math.isfinite(error) else None}
