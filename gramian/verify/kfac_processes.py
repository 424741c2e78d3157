"""Checks of K-FAC on several processes: models times reductions, storage policies, damping modes and dtypes.

Every process draws the same samples and takes its own part: different numbers of them, or, for the last process, none. Their
joint result is compared with the dense reference on all samples, which every process computes for itself in float64 on the CPU.
Drawn labels, token subsets and float32 are compared with the library on one process.

Legend: N loss terms of all processes, W processes with samples of their own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramian.curvature import KFACNaturalGradient
from gramian.curvature.blocks.damping import DAMPING_MODES
from gramian.curvature.options import POLICIES
from gramian.verify.checks import Comparison, VerifyCheck, relative_error
from gramian.verify.kfac_comparison import (
    compare_factors,
    compare_kfac,
    compare_natural,
    make_kfac,
)
from gramian.verify.kfac_matrix import DEVICES_FLOAT32, TOLERANCE
from gramian.verify.kfac_reference import KFACReference
from gramian.verify.kfac_subjects import SUBJECTS, KFACSubject, cross_entropy
from gramian.verify.model_layouts import GPT_LINEARS, ModelLayout, gathered

REDUCTIONS = ("gram", "gather", "dense")
POWERS = {-1.0: "-1", -0.5: "-1/2"}
SAMPLES = (3, 1, 2, 1)
"""Number of samples of each process; further processes repeat the sequence."""
SUBSET = 2
"""Number of tokens that the check of token subsets selects: fewer than any model here has."""
LINEARS: dict[str, dict[str, str]] = {
    "mlp": {"0": "outputs", "2": "inputs"},
    "gpt": GPT_LINEARS,
}
"""{model: {tensor-parallel linear layer: the side by which it is split, "outputs" or "inputs"}}."""
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
OF_THE_BOUND = "of bound"


@dataclass(frozen=True)
class ProcessCase:
    """Options of one comparison: reduction over processes, storage policy, damping mode, condition-number clip."""

    reduction: str
    policy: str
    mode: str
    clip: bool

    @property
    def label(self) -> str:
        """Name of the case in tables: reduction, policy, and whether the clip is on."""
        return f"{self.reduction}, {self.policy}{', clip' if self.clip else ''}"


CASES = tuple(ProcessCase(*which) for which in itertools.product(REDUCTIONS, POLICIES, DAMPING_MODES, (False, True)))


@dataclass(frozen=True)
class _Bench:
    """The checks of K-FAC on several processes for one model; collective, in the same order on every process."""

    subject: KFACSubject
    layout: ModelLayout
    cases: tuple[ProcessCase, ...]
    alone: Any
    """A process group with this process as its only member; None if there is only one process."""

    @cached_property
    def reference(self) -> KFACReference:
        """The dense reference of K-FAC on the samples of all processes."""
        return KFACReference(self.subject)

    @property
    def splits(self) -> dict[str, list[int]]:
        """Ways to split the samples, {name: number of samples of every process}, all with the same total.

        Torch cannot run a tensor-parallel layer on an empty batch that has an axis of positions.
        """
        counts = _samples(self.layout.data)
        if len(counts) == 1 or (self.layout.tensor_parallel and self.subject.causal):
            return {"": counts}
        return {"": counts, "an empty rank": [counts[0] + counts[-1], *counts[1:-1], 0]}

    @property
    def reductions(self) -> list[str]:
        """Reductions over processes that occur in the cases."""
        return list(dict.fromkeys(case.reduction for case in self.cases))

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Build the model and place it on the processes (DDP, FSDP2 or tensor parallel)."""
        model = self.subject.model(self.layout.grid.device, dtype)
        return self.layout.place(model, LINEARS[self.subject.name] if self.layout.tensor_parallel else None)

    def batch(self, counts: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and labels of this process's samples, and their numbers among all samples."""
        x, y = self.subject.batch(self.layout.grid.device, dtype)
        start = sum(counts[: self.layout.rank])
        ids = torch.arange(start, start + counts[self.layout.rank], device=x.device)
        return x[ids], y[ids], ids

    def capture(self, kfac: KFACNaturalGradient, model: nn.Module, counts: Sequence[int], **options: Any) -> None:
        """Run one backward of a summed loss on this process's samples inside `kfac.capture`."""
        x, y, ids = self.batch(counts, **options)
        model.zero_grad()
        with kfac.capture(model, num_terms=y.numel(), loss_reduction="sum", sample_ids=ids):
            cross_entropy(model, x, y, "sum").backward()

    # ---- against the oracle ----

    def factors(self) -> Iterator[Comparison]:
        """Compare the K-FAC factors A and G of all layers with the reference under every reduction and storage policy."""
        model = self.model()
        chosen = dict.fromkeys((case.reduction, case.policy) for case in self.cases)
        for (how, counts), (reduction, policy) in itertools.product(self.splits.items(), chosen):
            kfac = make_kfac(policy=policy, kfac_distributed_reduce=reduction)
            self.capture(kfac, model, counts)
            case = _label(reduction, policy, how)
            yield from compare_factors(kfac, self.reference.blocks, case)

    def natural(self, mode: str) -> Iterator[Comparison]:
        """Compare natural gradients with the reference, in all cases of damping mode `mode`."""
        model = self.model()
        counts = _samples(self.layout.data)
        mean = self.layout.data / self.reference.terms  # W processes divide by W the sum over N terms
        for case in (case for case in self.cases if case.mode == mode):
            kfac = make_kfac(mode, case.policy, case.clip, kfac_distributed_reduce=case.reduction)
            self.capture(kfac, model, counts)
            for power, name in POWERS.items():
                found = kfac.compute_natural_gradient(model, power)
                natural = {parameter: mean * gathered(t) for parameter, t in found.items()}
                label = f"{case.label}, power {name}"
                yield from compare_natural(kfac, natural, self.reference, mode, power, case.clip, label)

    def exact_head(self) -> Iterator[Comparison]:
        """Compare the factors with the reference, where G of the head is the exact one of its softmax."""
        reference = KFACReference(self.subject, exact_head=True)
        for case, kfac in self._together(kfac_true_fisher_head=True):
            yield from compare_factors(kfac, reference.blocks, case)

    def half_precision(self) -> Iterator[Comparison]:
        """Errors of factors stored in half precision, divided by their bound √rank · (rounding error that the record declares).

        Factors of a tied weight are float32 sums of rounded ones: their bound has the rounding of the half-precision dtype.
        """
        model = self.model()
        for (name, dtype), reduction in itertools.product(HALF.items(), self.reductions):
            kfac = make_kfac(kfac_distributed_reduce=reduction, woodbury_dtype=name)
            self.capture(kfac, model, _samples(self.layout.data))
            for layer, block in kfac.kfac_factors.items():
                wanted = self.reference.blocks[layer]
                for side, factor in block.factors.items():
                    exact = wanted.A if side == "A" else wanted.G
                    assert exact is not None
                    summed = factor.storage_dtype == torch.float32
                    rounding = torch.finfo(dtype).eps if summed else float(factor.quantisation_error)
                    error = relative_error(factor.to_dense(), exact) / (factor.rank**0.5 * rounding + TOLERANCE)
                    yield Comparison(f"{layer} {side}", f"{name}, {reduction}", error)

    # ---- against the library on one process ----

    def drawn_labels(self) -> Iterator[Comparison]:
        """Check that drawn labels depend on a sample's id, not on its process: factors equal those of one process."""
        model = self.model()
        x, y = self.subject.batch(self.layout.grid.device)
        ids = torch.arange(len(x), device=x.device)
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):

            def collect(kfac: KFACNaturalGradient, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> None:
                kfac.collect_kfac_factors(model, (x, y), "mc", n_samples=2, causal_shift=False, sample_ids=ids)

            together, one = make_kfac(kfac_distributed_reduce=reduction), make_kfac(process_group=self.alone)
            collect(together, model, *self.batch(counts))
            collect(one, self.subject.model(x.device), x, y, ids)
            yield from compare_kfac(together, one, _label("mc", reduction, how))

    def subset(self) -> Iterator[Comparison]:
        """Check that all processes together select the same subset of tokens (smallest random keys) as one process does."""
        for case, together in self._together(max_tokens=SUBSET):
            yield from compare_kfac(together, self._alone(max_tokens=SUBSET), case)

    def float32(self) -> Iterator[Comparison]:
        """Compare the factors of a float32 model, stored in float32, with those of one process."""
        one = self._alone(torch.float32, woodbury_dtype="fp32")
        for case, together in self._together(torch.float32, woodbury_dtype="fp32"):
            yield from compare_kfac(together, one, case)

    def _together(
        self, dtype: torch.dtype = torch.float64, **options: Any
    ) -> Iterator[tuple[str, KFACNaturalGradient]]:
        """K-FAC of all processes under every split of the samples and every reduction; yields (case name, K-FAC object)."""
        model = self.model(dtype)
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):
            kfac = make_kfac(kfac_distributed_reduce=reduction, **options)
            self.capture(kfac, model, counts, dtype=dtype)
            yield _label(reduction, how), kfac

    def _alone(self, dtype: torch.dtype = torch.float64, **options: Any) -> KFACNaturalGradient:
        """K-FAC of this process alone on the samples of all processes."""
        kfac = make_kfac(process_group=self.alone, **options)
        model = self.subject.model(self.layout.grid.device, dtype)
        x, y = self.subject.batch(self.layout.grid.device, dtype)
        with kfac.capture(model, num_terms=y.numel(), loss_reduction="sum"):
            cross_entropy(model, x, y, "sum").backward()
        return kfac


def _label(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _samples(processes: int) -> list[int]:
    """Number of samples of every process, by rank."""
    return [SAMPLES[rank % len(SAMPLES)] for rank in range(processes)]


def plan(
    layout: ModelLayout, models: Sequence[str] = tuple(SUBJECTS), cases: Sequence[ProcessCase] = CASES
) -> list[VerifyCheck]:
    """List the checks of K-FAC on several processes, model by model; nothing is computed yet.

    The checks are collective, in the same order on every process. Tensor parallelism checks the models in `LINEARS` alone.
    """
    alone, _ = dist.new_subgroups(group_size=1) if layout.grid.size > 1 else (None, None)
    found = []
    for name in models:
        if layout.tensor_parallel and name not in LINEARS:
            continue
        subject = replace(SUBJECTS[name], samples=sum(_samples(layout.data)))
        bench = _Bench(subject, layout, tuple(cases), alone)
        check: Callable[..., VerifyCheck] = partial(VerifyCheck, name)
        found += [check("factors A and G", TOLERANCE, bench.factors)]
        for mode in dict.fromkeys(case.mode for case in cases):
            found += [check(f"natural gradient, {mode} damping", TOLERANCE, partial(bench.natural, mode))]
        found += [
            check("exact softmax head", TOLERANCE, bench.exact_head),
            check("labels drawn by sample id", TOLERANCE, bench.drawn_labels),
            check("a keyed subset of tokens", TOLERANCE, bench.subset),
            check("float32", DEVICES_FLOAT32, bench.float32),
            check("float16 and bfloat16 at rest", 1.0, bench.half_precision, unit=OF_THE_BOUND),
        ]
    return found
