"""Checks of DP-SGD clipping against a loop over single samples: models times algorithms, modes, dtypes and loss reductions.

Every process draws the same samples and takes its own part, of a different size. The reference is the loop over the samples of
all processes, in float64 on the CPU: nothing of the library takes part in it.

Legend: B samples, C the clip norm.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gramian.core.errors import GramianError
from gramian.oracles.clipped_sum import ClippedSum, clip
from gramian.oracles.single_sample import per_sample_gradients
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy import PrivacyEngine
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.taps.hub import hub_of
from gramian.verify.checks import Comparison, VerifyCheck, relative_error
from gramian.verify.clipping_subjects import SUBJECTS, ClippingSubject, loss_of, loss_terms
from gramian.verify.model_layouts import GPT_LINEARS, gathered, spread

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""{dtype: largest error} of per-sample norms, and of clipped sums relative to the sum of the norms that are added. In float32
the library clips to a norm that is smaller by a declared safety margin, relatively 8e-6.
"""
MODES = ("auto", "bookkeeping", "keep", "two_pass")
ALGORITHMS = ("auto", "gram", "direct")
REDUCTIONS: tuple[str | float, ...] = ("mean", "sum", 0.25)
SAMPLES = (3, 1, 4, 2)
"""Number of samples of each process; further processes repeat the sequence."""
LINEARS = {"mlp": {"0": "outputs", "2": "inputs"}, "gpt": GPT_LINEARS, "tied gpt": GPT_LINEARS}
"""{model: {tensor-parallel linear layer: the side by which it is split, "outputs" or "inputs"}}."""
EXPECTED_BATCH = 5.0
"""Expected batch size, by which a private step divides: not the number of samples of any process."""


@dataclass(frozen=True)
class ClippingCase:
    """Options of one clipped-sum comparison: clipping mode, norm algorithm, loss reduction."""

    mode: str
    algorithm: str
    reduction: str | float

    @property
    def label(self) -> str:
        """Name of the case in tables: mode, algorithm and reduction."""
        return f"{self.mode}, {self.algorithm}, {self.reduction}"


CASES = tuple(
    ClippingCase(*which)
    for which in product(MODES, ALGORITHMS, REDUCTIONS)
    if which[0] != "keep" or which[1] == "auto"  # stored gradients have their own norm
)


@cache
def _gradients(name: str, samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Reference gradients {parameter: [B, ...]} of the samples of all processes, at weights and inputs rounded to `dtype`."""
    subject = SUBJECTS[name]
    x, y = subject.batch(samples, dtype)
    exact = (x.double() if x.is_floating_point() else x, y)
    return per_sample_gradients(subject.model(dtype).double(), loss_of, exact)


@dataclass(frozen=True)
class _Bench:
    """Checks of clipping for one model in one dtype, on this process."""

    subject: ClippingSubject
    dtype: torch.dtype
    grid: ProcessGrid
    cases: tuple[ClippingCase, ...]
    stopwatch: Stopwatch | None = None
    """Collects the times of the private steps; None: they are not timed."""

    @property
    def counts(self) -> list[int]:
        """Number of samples of every process, or tensor-parallel group, by its number."""
        return [SAMPLES[rank % len(SAMPLES)] for rank in range(self.grid.data[1])]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Reference gradients {parameter: [B, ...]} of the samples of all processes."""
        return _gradients(self.subject.name, sum(self.counts), self.dtype)

    @property
    def limit(self) -> float:
        """A clip norm that clips about half of the samples."""
        return float(clip(self.gradients, 1.0).norms_B.quantile(0.5)) * 0.97

    @property
    def rows(self) -> slice:
        """Slice of this process's samples among those of all processes."""
        number = self.grid.data[0]
        start = sum(self.counts[:number])
        return slice(start, start + self.counts[number])

    @property
    def share(self) -> slice:
        """Slice of the samples in `rows` whose norms this process computes: all, or its share in a tensor-parallel group."""
        (each, more), number = (
            divmod(self.counts[self.grid.data[0]], self.grid.tensor),
            self.grid.rank % self.grid.tensor,
        )
        start = number * each + min(number, more)
        return slice(start, start + each + (number < more))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the samples of all processes, on this process's device."""
        x, y = self.subject.batch(sum(self.counts), self.dtype)
        return x.to(self.grid.device), y.to(self.grid.device)

    @contextmanager
    def private(self, **options: Any) -> Iterator[tuple[nn.Module, torch.optim.SGD, PrivacyEngine]]:
        """Context manager: the model, private without noise and placed on the processes, its optimizer, and its privacy engine.

        `options` are further arguments of `make_private`.
        """
        model = spread(
            self.subject.model(self.dtype).to(self.grid.device), self.grid, LINEARS.get(self.subject.name, {})
        )
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        engine = PrivacyEngine(insecure_reproducible=True, seed=0)
        engine.stopwatch.on = self.stopwatch is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "poisson_sampling: is off")
            engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=1),
                noise_multiplier=0.0,
                max_grad_norm=self.limit,
                poisson_sampling=False,
                expected_batch=EXPECTED_BATCH,
                sample_rate=0.1,
                **options,
            )
        refusals = hub_of(model).refusals
        try:
            yield model, optimizer, engine
        except Exception as problem:
            if not isinstance(problem, GramianError):  # the other processes would wait for this one in their step
                with suppress(GramianError), refusals.told():
                    raise GramianError(f"{type(problem).__name__}: {problem}") from problem
            raise
        finally:
            engine.detach()
            if self.stopwatch is not None:
                self.stopwatch.entries.extend(engine.stopwatch.entries)

    # ---- checks ----

    def sums(self) -> Iterator[Comparison]:
        """Compare the gradients after a private step, and every sample's norm, with the reference, in all cases."""
        want = clip(self.gradients, self.limit)
        (x, y), mine = self.batch(), self.rows
        for case in self.cases:
            options = {"clipping": case.mode, "norm_algorithm": case.algorithm, "loss_reduction": case.reduction}
            with self.private(**options) as (model, optimizer, engine):
                loss = loss_of(model, x[mine], y[mine], case.reduction)
                engine.backward(loss) if case.mode == "two_pass" else loss.backward()
                if engine.last is None:
                    raise RuntimeError("the backward left no norms")
                norms = relative_error(engine.last.norms_B, want.norms_B[mine][self.share])
                optimizer.step()
                yield from _compare(model, want, case.label)
            yield Comparison("norms", case.label, norms)

    def functions(self) -> Iterator[Comparison]:
        """Compare the gradients after a private step by other clipping functions than "flat"."""
        (x, y), mine = self.batch(), self.rows
        for mode, function in product(dict.fromkeys(case.mode for case in self.cases), ("per_layer", "automatic")):
            want = clip(self.gradients, self.limit, function)
            with self.private(clipping=mode, clip_function=function, loss_reduction="sum") as (
                model,
                optimizer,
                engine,
            ):
                engine.backward(loss_of(model, x[mine], y[mine]))
                optimizer.step()
                yield from _compare(model, want, f"{mode}, {function}")

    def units(self) -> Iterator[Comparison]:
        """Compare a private step in which two samples of a process at a time are one unit; of language models also by token."""
        pairs = [torch.arange(count) // 2 + sum(self.counts) * rank for rank, count in enumerate(self.counts)]
        numbers_B = torch.cat(pairs).unique(return_inverse=True)[1]
        count = int(numbers_B.max()) + 1
        grouped = {n: g.new_zeros(count, *g.shape[1:]).index_add_(0, numbers_B, g) for n, g in self.gradients.items()}
        want, (x, y), mine = clip(grouped, self.limit), self.batch(), self.rows
        ways = {"rows": numbers_B[mine]}
        if y.dim() > 1:  # a label for each token
            ways["tokens"] = numbers_B[mine, None].expand_as(y[mine])
        for mode, (way, ids) in product(dict.fromkeys(case.mode for case in self.cases), ways.items()):
            with self.private(clipping=mode, loss_reduction="sum") as (model, optimizer, engine), engine.units(ids):
                engine.backward(loss_of(model, x[mine], y[mine]))
                optimizer.step()
                yield from _compare(model, want, f"{mode}, {way}")

    def accumulated(self) -> Iterator[Comparison]:
        """Compare a private step after several backwards, in one of which the last process has no samples."""
        want = clip(self.gradients, self.limit)
        (x, y), mine = self.batch(), self.rows
        number, count = self.grid.data
        alone = count == 1
        cut = mine.start + 1 if alone or number < count - 1 else mine.stop
        for mode in dict.fromkeys(case.mode for case in self.cases):
            with self.private(clipping=mode, loss_reduction="sum") as (model, optimizer, engine):
                for part in (slice(mine.start, cut), slice(cut, mine.stop)):
                    if part.start < part.stop or not alone:  # of several processes each runs every backward
                        engine.backward(loss_of(model, x[part], y[part]))
                optimizer.step()
                yield from _compare(model, want, mode)

    def single(self) -> Iterator[Comparison]:
        """Compare a private step whose batches have one sample each, so that the ordinary summed gradient is clipped."""
        (x, y), mine = self.batch(), self.rows
        with self.private(clipping="keep", max_physical_batch=1) as (model, optimizer, _):
            for i in range(max(self.counts)):
                at = min(mine.start + i, mine.stop)
                part = slice(at, min(at + 1, mine.stop))
                if part.start < part.stop:
                    loss_of(model, x[part], y[part]).backward()
            optimizer.step()
            yield from _compare(model, clip(self.gradients, self.limit), "one at a time")

    def nonfinite(self) -> Iterator[Comparison]:
        """Compare a private step in which the first sample of the first process is NaN: it must be left out."""
        want = clip({name: g[1:] for name, g in self.gradients.items()}, self.limit)
        (x, y), mine = self.batch(), self.rows
        weights = torch.ones(len(x), dtype=self.dtype, device=self.grid.device)
        weights[0] = float("nan")
        for mode in dict.fromkeys(case.mode for case in self.cases):
            with self.private(clipping=mode, loss_reduction="sum") as (model, optimizer, engine):
                engine.backward((loss_terms(model, x[mine], y[mine]) * weights[mine]).sum())
                counted = engine.nonfinite
                optimizer.step()
                yield from _compare(model, want, mode)
            yield Comparison("samples left out", mode, float(abs(counted - (self.grid.rank == 0))))


def _compare(model: nn.Module, want: ClippedSum, case: str) -> Iterator[Comparison]:
    """Compare every parameter's gradient after a step with the reference: clipped sum / expected batch size."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        name = name.removeprefix("module.")
        if p.grad is None:
            raise RuntimeError(f"{name} has no gradient after a step")
        total = gathered(p.grad).double() * EXPECTED_BATCH
        yield Comparison(name, case, relative_error(total, want.totals[name], want.sizes[name]))


def plan(
    grid: ProcessGrid,
    models: Sequence[str] = tuple(SUBJECTS),
    cases: Sequence[ClippingCase] = CASES,
    stopwatch: Stopwatch | None = None,
) -> list[VerifyCheck]:
    """List the checks of clipping, model by model; nothing is computed yet.

    The checks are collective, in the same order on every process. `stopwatch` collects the times of all private steps; None:
    they are not timed.
    """
    found: list[VerifyCheck] = []
    for name in models:
        subject, check = SUBJECTS[name], partial(VerifyCheck, name)
        if (grid.uses_fsdp2 and not subject.shards) or (grid.spreads and name not in LINEARS):
            continue
        benches = {dtype: _Bench(subject, dtype, grid, tuple(cases), stopwatch) for dtype in TOLERANCES}
        for dtype, bench in benches.items():
            found += [check(f"clipped sums, {str(dtype).removeprefix('torch.')}", TOLERANCES[dtype], bench.sums)]
        exact, tolerance = benches[torch.float64], TOLERANCES[torch.float64]
        found += [check("clipping functions", tolerance, exact.functions)]
        if not grid.spreads:
            found += [check("units of two samples", tolerance, exact.units)]
        found += [check("several backwards", tolerance, exact.accumulated)]
        if not grid.uses_fsdp2:
            found += [check("single samples", tolerance, exact.single)]
        found += [check("a sample that is NaN", tolerance, exact.nonfinite)]
    return found
