"""`gramian.check(model, batch)`: what of a user's own model is exact, approximated or refused, measured on a few samples.

"Exact" is measured, not assumed. With g_i the gradient of sample i, run alone, without taps and in the model's own dtype:

- coupling: the gradient of the batch is Σ_i g_i; otherwise no sample has a gradient of its own;
- per-sample norms: those of a backward of the batch are ‖g_i‖;
- private sum: `PrivacyEngine` leaves Σ_i min(1, C/‖g_i‖) g_i in `p.grad`, parameter by parameter.

Cost: six forwards and backwards of one sample, four of the batch, and two row proofs. Memory: three copies of the gradient.
"""

import importlib.util
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_mixing
from gramian.taps.hub import separate_hub
from gramian.taps.model.find_layers import discover
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.run_eagerly import run_eagerly
from gramian.taps.model.user_names import is_compiled, unwrap
from gramian.verify.user_model.model_report import KFAC_NAMES, Finding, LayerGroup, ModelCheck, Verdict
from gramian.verify.user_model.model_runs import SMOOTH, ModelRuns

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""{narrowest dtype of the model: largest relative error that counts as exact}; ten times as much for float32 on a GPU, whose
convolutions multiply in TF32. Batches of one and of three samples are summed in different orders."""
SHOWN = 3
"""Largest number of names in a line; further names are counted."""


def check(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None, *, show: bool = True
) -> ModelCheck:
    """Print what is exact, approximated or refused for a model, established on the first three samples of a batch.

    ```python
    report = gramian.check(model, x)  # or (x, mask), or {"input_ids": ids, "attention_mask": mask}
    report.ok, report.finding("private sum").verdict
    ```

    Weights, gradients, buffers, random states, modes and hooks of the model are left as they were. A refusal of gramian and an
    error of the model's own forward are findings and are not raised.

    Args:
        model: the user's model, before `make_private`. A compiled one is examined eagerly.
        batch: what its forward takes, at least two samples on axis 0: a tensor, a tuple or list of positional arguments, or a
            mapping of keyword arguments. With `loss`, entries that the forward has no parameter for go to the loss alone.
        loss: `loss(outputs, batch)` is one number per sample, or their sum or mean. None: a smooth function of the first output
            with a row per sample, so that the model alone is examined.
        show: print the report.

    Returns:
        The report: `ok`, `layers`, `findings`, `to_dict()`; `print(report)` is the table.

    Raises:
        GramianError: if the model is private, sharded or not a module, or the batch has fewer than two different samples.
    """
    if not isinstance(model, nn.Module):
        raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
    root, started = unwrap(model), time.perf_counter()
    if any(isinstance(p, DTensor) for p in root.parameters()):
        raise GramianError("model: is sharded over processes; expected the model before fully_shard")
    compiled = is_compiled(model) or any(is_compiled(module) for module in root.modules())
    with separate_hub(root), preserve_state(root, counters=True, arguments=pytree.tree_leaves(batch)), run_eagerly():
        examined = _Examination(ModelRuns(root, batch, loss), compiled)
        examined.run()
    groups, runs = examined.groups(), examined.runs
    report = ModelCheck(tuple(groups), tuple(examined.findings), runs.count, time.perf_counter() - started)
    if show:
        from rich.console import Console

        Console(highlight=False).print(report)
    return report


class _Examination:
    """The findings about one model, in the order in which `run` makes them."""

    def __init__(self, runs: ModelRuns, compiled: bool) -> None:
        self.runs, self.findings, self._compiled = runs, list[Finding](), compiled
        self.named = unique_parameters(runs.root)
        self._refused: dict[str, GramianError] = {}
        """{class of a layer: why gramian refuses it}."""
        self._norms_B: Tensor | None = None
        """Gradient norms of the samples alone; None: there is nothing to compare with, for the reason `_why_not`."""
        self._why_not = "a sample does not run alone"
        self._errors: dict[str, float] | None = None
        """{parameter: error of its clipped sum}; None: not measured."""
        self._kinds: dict[str, str] = {}
        """{parameter: approximation of its Fisher}."""
        p = next((p for _, p in self.named if p.requires_grad), torch.zeros(()))
        dtypes = {p.dtype for _, p in self.named if p.requires_grad and p.dtype in TOLERANCES} or {torch.float32}
        dtypes |= {torch.get_autocast_dtype(p.device.type)} if torch.is_autocast_enabled(p.device.type) else set()
        self.dtype, self._device = max(dtypes, key=lambda dtype: TOLERANCES[dtype]), p.device.type
        on_gpu = self.dtype == torch.float32 and self._device == "cuda"
        self.tolerance = TOLERANCES[self.dtype] * (10 if on_gpu else 1)

    def add(self, subject: str, verdict: Verdict, text: str, change: str = "") -> None:
        self.findings.append(Finding(subject, verdict, text, change))

    def refuse(self, subject: str, problem: GramianError) -> None:
        reason, _, change = str(problem).partition("; expected ")
        self.add(subject, "refused", reason, change)

    def attempt(self, subject: str, measure: Callable[[], None]) -> bool:
        """Run one measurement; a GramianError becomes a refusal, any other error a failure of the user's own code."""
        try:
            measure()
        except GramianError as problem:
            self.refuse(subject, problem)
        except Exception as problem:  # the user's own code may raise anything
            self.add(subject, "failed", _told(problem))
        else:
            return True
        return False

    def run(self) -> None:
        """Make all findings; after a failed forward, or for a layer that no capture accepts, nothing more is measured."""
        if not (self.attempt("layers", self._layers) and self.attempt("forward", self.runs.prepare)):
            return
        self._setting()
        for problem in self._refused.values():
            self.refuse("per-sample norms", problem)
        if self._refused:
            self.add("private sum", "refused", "needs per-sample norms")
        else:
            self.attempt("samples apart", self._coupling)
            if importlib.util.find_spec("opacus") is None:
                self.add("private sum", "not examined", "opacus is not here", "gramian[privacy] installed")
            else:
                self.attempt("private sum", self._private)
            if all(found.subject != "per-sample norms" for found in self.findings):
                self.attempt("per-sample norms", self._captured)
        self.attempt("K-FAC", self._kfac)
        self._not_trained()

    # ---- measurements ----------------------------------------------------------------------------------------------

    def _layers(self) -> None:
        """Find all classes of layers that are refused whatever the batch is; a GramianError if the model cannot be tapped."""
        discover(self.runs.root)
        for name, module, site in layers_with_sites(self.runs.root):
            try:
                refuse_mixing([(name, module, site)])
            except GramianError as problem:
                self._refused.setdefault(type(module).__name__, problem)

    def _setting(self) -> None:
        runs = self.runs
        mode = "training" if runs.root.training else "evaluation"
        found = [f"{runs.count} of {runs.batch} samples, {str(self.dtype)[6:]} on {self._device}, {mode} mode"]
        found += [f"{runs.mode} for the comparison with single samples"] * bool(runs.mode)
        found += [SMOOTH if runs.loss is None else f"your loss{', a mean over samples' * runs.mean}"]
        self.add("examined", "note", "; ".join(found))
        if self._compiled:
            outside = {type(m).__name__ for _, m, site in layers_with_sites(runs.root) if not site.compiles}
            breaks = f"; the graph breaks at {_some(sorted(outside))}" if outside else ""
            self.add("compiled", "note", f"the model's own Python was examined, which is what is compiled{breaks}")

    def _coupling(self) -> None:
        if not self.runs.repeats:
            self._why_not = "the outputs are random in evaluation mode, too"
            return
        whole = self.runs.batch_gradient()
        try:
            error, norms_B = self.runs.compare_with_alone(whole)
        except Exception as problem:  # taps accept such models, by a copy beside the sample
            self.add("samples apart", "not examined", f"a sample does not run alone: {_told(problem)}")
            return
        if not bool(norms_B.isfinite().all()):
            raise ValueError("the gradient of a sample is not finite")
        if error <= self.tolerance:
            self._norms_B = norms_B
            self.add("samples apart", "exact", f"the batch's gradient is the sum of its samples' {self._within(error)}")
            return
        changed = self.runs.changed_outputs(self.tolerance)
        self._why_not = "the samples are coupled"
        self.add(
            "samples apart",
            "coupled",
            f"the {'model' if changed else 'loss'} couples the samples of a batch by design{changed}: its gradient is not "
            f"the sum of its samples' gradients (relative difference {error:.2g}), so no tool can compute them exactly",
            "no statistics over the batch, and a loss that is a sum or mean of one term for each sample"
            + ", or model.double() if this may be rounding" * (self.dtype != torch.float64),
        )

    def _private(self) -> None:
        norms_B = self._norms_B
        limit = 1.0 if norms_B is None else 0.97 * float(norms_B.median()) or 1.0
        if self.runs.mode:
            self.runs.private(limit, own_mode=True)
        found_B, gradient = self.runs.private(limit)
        self._norms(found_B)
        if norms_B is None:
            self.add("private sum", "not examined", f"accepted; not compared: {self._why_not}")
            return
        self._errors = dict(zip(self.runs.names, self.runs.compare_clipped(gradient, norms_B, limit), strict=True))
        name, error = max(self._errors.items(), key=lambda pair: pair[1])
        self._measured("private sum", error, f"clipped sums of all parameters, the worst {name},")

    def _captured(self) -> None:
        if self.runs.mode:
            self.runs.captured_norms(own_mode=True)
        self._norms(self.runs.captured_norms())

    def _norms(self, found_B: Tensor) -> None:
        if self._norms_B is None:
            self.add("per-sample norms", "not examined", f"accepted; not compared: {self._why_not}")
            return
        floor = float(self._norms_B.max()) * 1e-6 + 1e-30
        error = float(((found_B - self._norms_B).abs() / self._norms_B.clamp(min=floor)).max())
        self._measured("per-sample norms", error, "those of one backward of the batch")

    def _kfac(self) -> None:
        self._kinds, reasons = self.runs.kfac_kinds()
        sizes = dict.fromkeys(KFAC_NAMES, 0)
        for name, p in self.named:
            if p.requires_grad:
                sizes[self._kinds.get(name, "none")] += p.numel()
        total = max(1, sum(sizes.values()))
        parts = [f"{_percent(n / total)} {KFAC_NAMES[kind]}" for kind, n in sizes.items() if n]
        self.add("K-FAC", "approximated", f"Fisher of the trained entries: {', '.join(parts)}")
        only = [f"{name}{reasons[name]}" for name, kind in self._kinds.items() if kind == "diagonal"]
        if only:
            self.add("diagonal only", "note", _some(only))

    def _not_trained(self) -> None:
        frozen = [name for name, p in self.named if not p.requires_grad]
        if frozen:
            self.add("frozen", "not trained", _some(frozen))
        if self.runs.unused:
            self.add("unused", "note", f"got no gradient from this batch: {_some(self.runs.unused)}")

    # ---- words -----------------------------------------------------------------------------------------------------

    def _measured(self, subject: str, error: float, what: str) -> None:
        verdict: Verdict = "exact" if error <= self.tolerance else "wrong"
        text, change = f"{what} are those of single samples {self._within(error)}", ""
        if verdict == "wrong":
            text, change = (
                text.replace(" are ", " differ from ", 1),
                "the same in float64 (model.double()), without rounding",
            )
        self.add(subject, verdict, text, change)

    def _within(self, error: float) -> str:
        return f"(error {error:.1g}, tolerance {self.tolerance:.0e})"

    def groups(self) -> list[LayerGroup]:
        """A row for each class of layers with parameters, in the model's order."""
        known, counted = dict(self.named), set[str]()
        found: dict[tuple[str, str], list[Sequence[str]]] = {}
        try:
            layers = discover(self.runs.root)[0]
        except GramianError:
            return []
        for layer in layers:
            if layer.site is not None:
                key = type(layer.module).__name__, layer.site.kind
                found.setdefault(key, []).append([*layer.parameters.values()])
        groups = []
        for (layers_name, formula), each in found.items():
            names = dict.fromkeys(name for own in each for name in own)
            trained = [name for name in names if known[name].requires_grad]
            errors = [self._errors[name] for name in trained] if self._errors is not None else []
            verdict: Verdict = "not examined"
            if layers_name in self._refused:
                verdict = "refused"
            elif not trained:
                verdict = "not trained"
            elif errors:
                verdict = "exact" if max(errors) <= self.tolerance else "wrong"
            sizes, kfac = {True: 0, False: 0}, dict[str, int]()
            for name in names:
                size = 0 if name in counted else known[name].numel()
                sizes[known[name].requires_grad] += size
                if self._kinds and known[name].requires_grad:
                    kind = self._kinds.get(name, "none")
                    kfac[kind] = kfac.get(kind, 0) + size
            counted.update(names)
            error = max(errors, default=None)
            groups.append(LayerGroup(layers_name, len(each), formula, sizes[True], sizes[False], verdict, error, kfac))
        return groups


def _told(problem: Exception) -> str:
    """An exception's type and message, and the last line of code outside of torch that it went through."""
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if "/torch/" not in frame.filename]
    where = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}{where}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "<1 %"
