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

from gramian.analysis.analysis_plan import AnalysisPlan, make_plan
from gramian.analysis.collect import collect
from gramian.analysis.joined_products import JoinedProducts
from gramian.analysis.options import TOLERANCE, Settings
from gramian.analysis.spectrum_curves import ggn_density, kfac_density, layer_spectra
from gramian.analysis.subject import Subject
from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.curvature import GGNOperator, HessianOperator, KFACNaturalGradient
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.linalg import LanczosSpectrum, SpectralDensity, lanczos, spectral_density
from gramian.linalg.spectra.operator import Operator
from gramian.parallel.exchange import Exchange
from gramian.parallel.process_grid import ONE_PROCESS, ProcessGrid
from gramian.train.loop.objective import IGNORED

SCHEMA = 1
Update = Callable[[int, int], None]
"""Progress callback of a stage: called with (units done, units in total)."""
Stage = Callable[[str], AbstractContextManager[Update]]
"""Function that opens a stage by its name: returns a context around the stage, whose value is the progress callback."""
Result = dict[str, Any]


def kfac_of(subject: Subject, settings: Settings) -> KFACNaturalGradient:
    """Make the K-FAC object of an analysis, with the options of `settings`, in float64 for a float64 model, else float32."""
    return KFACNaturalGradient(
        kfac_policy=settings.policy,
        memory_budget=settings.memory_budget,
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


def placed(subject: Subject, settings: Settings, grid: ProcessGrid = ONE_PROCESS) -> tuple[Subject, AnalysisPlan]:
    """The subject where its analysis fits, and the plan there: on its own device, or on the CPU if that is too small.

    A subject that was moved has a note that says so. Collective: processes move together.

    Raises:
        GramianError: if the memory of the CPU is too small as well; the message has the bytes needed and the bytes free.
    """
    plan = plan_of(subject, settings)
    short = plan.shortage()
    if plan.device.type != "cpu" and grid.most(float(bool(short))):
        subject = subject.to(
            torch.device("cpu"), f"Moved to the CPU: {short or 'another process has too little memory'}."
        )
        plan = plan_of(subject, settings)
        short = plan.shortage()
    if grid.most(float(bool(short))):
        why = short or "another process has too little memory"
        raise GramianError(
            f"memory: {why}; expected a --memory-budget, fewer --eigenvalues, --steps or --tokens, or --probes 0"
        )
    return subject, plan


def analyse(
    subject: Subject,
    settings: Settings,
    stage: Stage = lambda name: nullcontext(lambda done, total: None),
    keep: Callable[[Result], None] = lambda result: None,
    grid: ProcessGrid = ONE_PROCESS,
) -> Result:
    """Measure the curvature of a model, as in `analyse(subject, Settings(probes=0))["kfac"]["metrics"]`.

    Args:
        subject: the model and its batches; on several processes all of them have the same.
        settings: what to compute.
        stage: called with a stage's name; returns a context around that stage, whose value is the progress callback.
        keep: called with the result after every stage; its "complete" is true after the last one.
        grid: the processes that share the rows of every batch. Collective; the result is that of one process to rounding.

    Returns:
        {"settings", "model", "data", "notes", "versions", "plan", "kfac", "ggn", "hessian", "seconds", "complete"}; see
        docs/how-to/curvature.md.

    Raises:
        GramianError: if the model or the batches do not fit.
    """
    result = _about(subject, settings, grid)
    run = _Stages(subject, settings, grid)
    stages: list[tuple[str, Callable[[Update], Result]]] = [("kfac", run.kfac)]
    if settings.probes:
        stages.append(("ggn", run.ggn))
    if settings.hessian:
        stages.append(("hessian", run.hessian))
    for number, (name, compute) in enumerate(stages, start=1):
        started = time.perf_counter()
        with stage(name) as update:
            result[name] = compute(update)
        result["seconds"][name] = time.perf_counter() - started
        result["complete"] = number == len(stages)
        keep(result)
    return result


def _about(subject: Subject, settings: Settings, grid: ProcessGrid) -> Result:
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
        "processes": grid.size,
        "plan": plan_of(subject, settings).facts(),
        "seconds": {},
    }


# ---- stages ----------------------------------------------------------------------------------------------------------


class _Stages:
    """The stages of one analysis on this process, one of those of `grid`; each returns its section of the result."""

    def __init__(self, subject: Subject, settings: Settings, grid: ProcessGrid) -> None:
        self._subject, self._settings = subject, settings
        self._share = subject.share(grid.rank, grid.size)
        device = next(subject.model.parameters()).device
        self._exchange = Exchange(grid.group, device) if grid.size > 1 else None

    def kfac(self, update: Update) -> Result:
        """K-FAC's factors, their metrics and spectra, and the record."""
        subject, settings = self._subject, self._settings
        kfac = kfac_of(subject, settings)
        loss = collect(kfac, subject.model, self._share, settings.fisher, settings.seed, update)
        metrics = kfac.compute_capacity_metrics(n=settings.samples)
        spectra = layer_spectra(kfac.kfac_factors, kfac.state.exchange)
        return {
            "loss": loss,
            "metrics": metrics,
            "top_eigenvalues": kfac.top_eigenvalues(settings.eigenvalues).tolist(),
            "spectra": spectra,
            "density": kfac_density(spectra),
            "record": kfac.record(),
        }

    def ggn(self, update: Update) -> Result:
        """Largest eigenvalues of the Gauss-Newton matrix by Lanczos; its density, trace and related sums by quadrature."""
        settings, products = self._settings, self._settings.probes * self._settings.steps
        operator = self._joined("ggn", update, settings.lanczos_limit + products)
        extremes = _lanczos(operator, settings.eigenvalues, "LA", settings)
        operator.total = operator.products + products
        density = spectral_density(operator, settings.probes, settings.steps, generator=_generator(operator, settings))
        facts = {"dim": operator.dim, "terms": operator.num_terms, "extremes": extremes}
        return {**facts, **_functions(density, settings.damping)}

    def hessian(self, update: Update) -> Result:
        """Both ends of the Hessian's spectrum by Lanczos."""
        operator = self._joined("hessian", update, self._settings.lanczos_limit)
        extremes = _lanczos(operator, self._settings.eigenvalues, "BE", self._settings)
        return {"dim": operator.dim, "extremes": extremes}

    def _joined(self, name: str, update: Update, total: int) -> JoinedProducts:
        model, batches = self._subject.model, [batch for _, batch in self._share]
        own: GGNOperator | HessianOperator | None = None
        if any(bool((batch["labels"] != IGNORED).any()) for batch in batches) or self._exchange is None:
            if name == "ggn":
                own = GGNOperator(model, batches, causal_shift=False)
            else:
                own = HessianOperator(model, "cross_entropy", batches, causal_shift=False)
        return JoinedProducts(own, ParameterSpace.of(model), self._exchange, update, total)


# ---- products --------------------------------------------------------------------------------------------------------


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
