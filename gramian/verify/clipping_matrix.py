"""Private training against a loop of single samples: layers times algorithms, modes, dtypes and reductions, on every process.

Every process draws the same samples and takes its own, a different number of them. The reference is the loop over the samples
of all processes, in float64 on the CPU: nothing of the library takes part in it.

Legend: B samples, T tokens, D width, V classes, C the clip norm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gramian.models import GPT, GPTConfig
from gramian.oracles.clipped_sum import ClippedSum, clip
from gramian.oracles.single_sample import per_sample_gradients
from gramian.parallel.world import World
from gramian.privacy import PrivacyEngine
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.verify.checks import Comparison, VerifyCheck
from gramian.verify.model_layouts import spread

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of sums, relative to the clipped gradients that are added up, and of norms. Float32 is short of C by a declared 8e-6."""
MODES = ("auto", "bookkeeping", "keep", "two_pass")
ALGORITHMS = ("auto", "gram", "direct")
REDUCTIONS: tuple[str | float, ...] = ("mean", "sum", 0.25)
SAMPLES = (3, 1, 4, 2)
"""Of each process; further ones begin anew."""
EXPECTED_BATCH = 5.0
"""What a step divides by: nobody's number of samples."""


@dataclass(frozen=True)
class ClippingCase:
    """Options under which a sum is formed."""

    mode: str
    algorithm: str
    reduction: str | float

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.mode}, {self.algorithm}, {self.reduction}"


CASES = tuple(
    ClippingCase(*which)
    for which in product(MODES, ALGORITHMS, REDUCTIONS)
    if which[0] != "keep" or which[1] == "auto"  # what is kept has its own norm
)


# ---- models ----------------------------------------------------------------------------------------------------------


class _Text(nn.Module):
    """An embedding with a padding row, layer norm, RMS norm, three-dimensional linears, one token per sample at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6, padding_idx=0), nn.LayerNorm(6)
        self.inner, self.scale, self.head = nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 5)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h_BTD = self.scale(torch.tanh(self.inner(self.norm(self.table(ids_BT)))))
        return self.head(h_BTD.mean(1))  # type: ignore[no-any-return]


class _Reused(nn.Module):
    """One linear called three times, another that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared, self.head, self.spare = (nn.Linear(*io) for io in ((7, 9), (9, 9), (9, 5), (3, 4)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.inner(x_BTD)
        for _ in range(3):
            h = h + torch.tanh(self.shared(h))
        return self.head(h.mean(1))  # type: ignore[no-any-return]


class _Adapted(nn.Module):
    """Frozen linears with trained adapters of low rank beside them, and a trained bias beside a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(7, 9), nn.Linear(7, 2, bias=False), nn.Linear(2, 9, bias=False)
        self.head = nn.Linear(9, 5)
        self.base.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x_BTD) + self.up(self.down(x_BTD))).mean(1))  # type: ignore[no-any-return]


class _Raw(nn.Module):
    """Parameters of its own beside layers: there is no formula for them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.token, self.gain = nn.Parameter(torch.zeros(1, 1, 9)), nn.Parameter(torch.ones(9))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.inner(x_BTD) * self.gain
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1)
        return self.head(torch.tanh(h).mean(1))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 5))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.GroupNorm(3, 6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _gpt(tied: bool) -> nn.Module:
    return GPT(GPTConfig(vocabulary=24, context=6, layers=2, width=8, heads=2, tied=tied))


def _checkpointed() -> nn.Module:
    model = _gpt(True)
    for block in model.blocks:  # type: ignore[union-attr]
        run = type(block).forward.__get__(block)
        block.forward = partial(checkpoint, run, use_reentrant=False)
    return model


@dataclass(frozen=True)
class ClippingSubject:
    """A model and what it reads; one label per sample, or one per token for ids."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one sample."""
    ids: int = 0
    """Token ids below this; 0: normal numbers."""
    classes: int = 5
    shards: bool = True
    """Whether it can be run with `fully_shard`."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The same weights every time; noise on them, since zero biases and unit scales hide errors."""
        generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = self.build().double()
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.2)
        return model.to(dtype)

    def batch(self, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and labels, the same every time."""
        generator = torch.Generator().manual_seed(2)
        if self.ids:
            x = torch.randint(self.ids, (samples, *self.shape), generator=generator)
        else:
            x = torch.randn(samples, *self.shape, generator=generator, dtype=torch.float64).to(dtype)
        per_token = self.ids == self.classes
        return x, torch.randint(self.classes, (samples, *self.shape) if per_token else (samples,), generator=generator)


SUBJECTS = {
    subject.name: subject
    for subject in (
        ClippingSubject("mlp", _mlp, (7,)),
        ClippingSubject("text", _Text, (6,), ids=11),
        ClippingSubject("gpt", lambda: _gpt(False), (6,), ids=24, classes=24),
        ClippingSubject("tied gpt", lambda: _gpt(True), (6,), ids=24, classes=24),
        ClippingSubject("checkpointed", _checkpointed, (6,), ids=24, classes=24),
        ClippingSubject("conv net", _convnet, (3, 5, 5)),
        ClippingSubject("reused", _Reused, (6, 7)),
        ClippingSubject("adapters", _Adapted, (6, 7)),
        ClippingSubject("raw", _Raw, (6, 7), shards=False),
    )
}


def _terms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[B]: one term of the loss per sample."""
    logits = model(x)
    terms = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    return terms.flatten(1).mean(1) if terms.dim() > 1 else terms


def _loss(model: nn.Module, x: Tensor, y: Tensor, reduction: str | float = "sum") -> Tensor:
    terms_B = _terms(model, x, y)
    if isinstance(reduction, str):
        return {"mean": terms_B.mean, "sum": terms_B.sum}[reduction]()
    return reduction * terms_B.sum()


# ---- the reference ---------------------------------------------------------------------------------------------------


@cache
def _gradients(name: str, samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """{parameter: [B, ...]} of every sample of every process, of the weights and inputs as the dtype rounds them."""
    subject = SUBJECTS[name]
    x, y = subject.batch(samples, dtype)
    exact = (x.double() if x.is_floating_point() else x, y)
    return per_sample_gradients(subject.model(dtype).double(), _loss, exact)


def _clip_norm(gradients: dict[str, Tensor]) -> float:
    """One that clips about half of the samples."""
    return float(clip(gradients, 1.0).norms_B.quantile(0.5)) * 0.97


# ---- the library -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """One subject in one dtype on this process."""

    subject: ClippingSubject
    dtype: torch.dtype
    where: World
    cases: tuple[ClippingCase, ...]
    stopwatch: Stopwatch | None = None
    """Collects the times of the private steps."""

    @property
    def counts(self) -> list[int]:
        """Samples of every process."""
        return [SAMPLES[rank % len(SAMPLES)] for rank in range(self.where.size)]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The reference's, of all samples."""
        return _gradients(self.subject.name, sum(self.counts), self.dtype)

    def rows(self, counts: Sequence[int]) -> slice:
        """Which samples are this process's."""
        start = sum(counts[: self.where.rank])
        return slice(start, start + counts[self.where.rank])

    def batch(self) -> tuple[Tensor, Tensor]:
        """All samples, on the device."""
        x, y = self.subject.batch(sum(self.counts), self.dtype)
        return x.to(self.where.device), y.to(self.where.device)

    @contextmanager
    def private(self, limit: float, **options: Any) -> Iterator[tuple[nn.Module, torch.optim.SGD, PrivacyEngine]]:
        """A private model without noise, spread over the processes."""
        model = spread(self.subject.model(self.dtype).to(self.where.device), self.where)
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
                max_grad_norm=limit,
                poisson_sampling=False,
                expected_batch=EXPECTED_BATCH,
                sample_rate=0.1,
                **options,
            )
        try:
            yield model, optimizer, engine
        finally:
            engine.detach()
            if self.stopwatch is not None:
                self.stopwatch.entries.extend(engine.stopwatch.entries)

    # ---- checks ----

    def sums(self) -> Iterator[Comparison]:
        """A step's gradients and every sample's norm, in all cases."""
        limit = _clip_norm(self.gradients)
        want = clip(self.gradients, limit)
        x, y = self.batch()
        mine = self.rows(self.counts)
        for case in self.cases:
            options = {"clipping": case.mode, "norm_algorithm": case.algorithm, "loss_reduction": case.reduction}
            with self.private(limit, **options) as (model, optimizer, engine):
                loss = _loss(model, x[mine], y[mine], case.reduction)
                engine.backward(loss) if case.mode == "two_pass" else loss.backward()
                norms = _error(_last_norms(engine), want.norms_B[mine], float(want.norms_B[mine].norm()))
                optimizer.step()
                yield from _compared(model, want, case.label)
            yield Comparison("norms", case.label, norms)

    def accumulated(self) -> Iterator[Comparison]:
        """Several backwards before a step, of which the last process has no samples in one."""
        limit = _clip_norm(self.gradients)
        want = clip(self.gradients, limit)
        (x, y), mine = self.batch(), self.rows(self.counts)
        alone = self.where.size == 1
        cut = mine.start + 1 if alone or self.where.rank < self.where.size - 1 else mine.stop
        for mode in dict.fromkeys(case.mode for case in self.cases):
            with self.private(limit, clipping=mode, loss_reduction="sum") as (model, optimizer, engine):
                for part in (slice(mine.start, cut), slice(cut, mine.stop)):
                    if (
                        part.start < part.stop or not alone
                    ):  # every process runs every backward, with samples or without
                        engine.backward(_loss(model, x[part], y[part]))
                optimizer.step()
                yield from _compared(model, want, mode)

    def single(self) -> Iterator[Comparison]:
        """Batches of one sample, whose whole gradient is clipped."""
        limit = _clip_norm(self.gradients)
        (x, y), mine = self.batch(), self.rows(self.counts)
        with self.private(limit, clipping="keep", max_physical_batch=1) as (model, optimizer, _):
            for i in range(max(self.counts)):
                at = min(mine.start + i, mine.stop)
                part = slice(at, min(at + 1, mine.stop))
                if part.start < part.stop:
                    _loss(model, x[part], y[part]).backward()
            optimizer.step()
            yield from _compared(model, clip(self.gradients, limit), "one at a time")

    def nonfinite(self) -> Iterator[Comparison]:
        """The first process's first sample is not a number and counts for nothing."""
        limit = _clip_norm(self.gradients)
        want = clip({name: g[1:] for name, g in self.gradients.items()}, limit)
        (x, y), mine = self.batch(), self.rows(self.counts)
        weights = torch.ones(len(x), dtype=self.dtype, device=self.where.device)
        weights[0] = float("nan")
        for mode in dict.fromkeys(case.mode for case in self.cases):
            with self.private(limit, clipping=mode, loss_reduction="sum") as (model, optimizer, engine):
                engine.backward((_terms(model, x[mine], y[mine]) * weights[mine]).sum())
                counted = engine.nonfinite
                optimizer.step()
                yield from _compared(model, want, mode)
            yield Comparison("samples left out", mode, float(abs(counted - (self.where.rank == 0))))


def _last_norms(engine: PrivacyEngine) -> Tensor:
    if engine.last is None:
        raise RuntimeError("the backward left no norms")
    return engine.last.norms_B


def _compared(model: nn.Module, want: ClippedSum, case: str) -> Iterator[Comparison]:
    """Every parameter's gradient after a step against the sum over the expected batch."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        name = name.removeprefix("module.")
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if found is None:
            raise RuntimeError(f"{name} has no gradient after a step")
        yield Comparison(name, case, _error(found.double() * EXPECTED_BATCH, want.totals[name], want.sizes[name]))


def _error(value: Tensor, reference: Tensor, size: float) -> float:
    if value.shape != reference.shape:
        raise ValueError(f"shape {list(value.shape)} against {list(reference.shape)} of the reference")
    return float((value.detach().cpu().double() - reference).norm()) / (size or 1.0)


def plan(
    where: World,
    models: Sequence[str] = tuple(SUBJECTS),
    cases: Sequence[ClippingCase] = CASES,
    stopwatch: Stopwatch | None = None,
) -> list[VerifyCheck]:
    """Every check of clipping, model by model; nothing is computed yet. The checks are collective.

    Args:
        where: this process.
        models: names in `SUBJECTS`.
        cases: a sample of them makes the run shorter.
        stopwatch: collects the times of all private steps; None: nothing is timed.

    Returns:
        Checks, to be run by `run_checks`, in the same order on every process.
    """
    found = []
    for name in models:
        subject = SUBJECTS[name]
        if where.kind == "fsdp2" and not subject.shards:
            continue
        exact = _Bench(subject, torch.float64, where, tuple(cases), stopwatch)
        for dtype, tolerance in TOLERANCES.items():
            bench = _Bench(subject, dtype, where, tuple(cases), stopwatch)
            found.append(VerifyCheck(name, f"clipped sums, {str(dtype).removeprefix('torch.')}", tolerance, bench.sums))
        tolerance = TOLERANCES[torch.float64]
        found.append(VerifyCheck(name, "several backwards", tolerance, exact.accumulated))
        if where.kind != "fsdp2":
            found.append(VerifyCheck(name, "single samples", tolerance, exact.single))
        found.append(VerifyCheck(name, "a sample that is NaN", tolerance, exact.nonfinite))
    return found
