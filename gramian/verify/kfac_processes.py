"""K-FAC of several processes against one: models times reductions, policies, damping modes and dtypes.

Every process draws the same samples and takes its own: different numbers of them, or, for the last process, none. What they
compute together is held against the dense oracle on all samples, computed by every process for itself in float64 on the CPU;
where the oracle has no word (drawn labels, subsets, float32), against the library on this process alone.

Legend: N loss terms of all processes, W processes with samples of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramian.curvature import KFACNaturalGradient
from gramian.verify.checks import Comparison, VerifyCheck, relative_error
from gramian.verify.kfac_matrix import (
    DAMPING,
    DAMPING_MODES,
    DEVICES_FLOAT32,
    POLICIES,
    SUBJECTS,
    TOLERANCE,
    KFACReference,
    KFACSubject,
    as_matrix,
    compare_factors,
    cross_entropy,
    make_kfac,
    raised_damping,
)
from gramian.verify.model_layouts import ModelLayout, whole

REDUCTIONS = ("gram", "gather", "dense")
POWERS = {-1.0: "-1", -0.5: "-1/2"}
SAMPLES = (3, 1, 2, 1)
"""Of each process; further ones begin anew."""
SUBSET = 2
"""Tokens of a keyed subset: fewer than any model here has."""
LINEARS: dict[str, dict[str, str]] = {
    "mlp": {"0": "outputs", "2": "inputs"},
    "gpt": {"blocks.*.fc": "outputs", "blocks.*.mlp_out": "inputs"},
}
"""{model: its layers that processes share, and what they are cut by}."""
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
OF_THE_BOUND = "of bound"


@dataclass(frozen=True)
class ProcessCase:
    """Options under which processes are compared with one."""

    reduction: str
    policy: str
    mode: str
    clip: bool

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.reduction}, {self.policy}{', clip' if self.clip else ''}"


CASES = tuple(ProcessCase(*which) for which in itertools.product(REDUCTIONS, POLICIES, DAMPING_MODES, (False, True)))


@dataclass(frozen=True)
class _Bench:
    """The checks of one model; collective, in the same order on every process."""

    subject: KFACSubject
    layout: ModelLayout
    cases: tuple[ProcessCase, ...]
    alone: Any
    """A process group of this process by itself; None: there are no others."""

    @classmethod
    def of(cls, name: str, layout: ModelLayout, cases: tuple[ProcessCase, ...], alone: Any) -> _Bench:
        """With samples for all processes."""
        samples = sum(_dealt(layout.data))
        return cls(replace(SUBJECTS[name], samples=samples), layout, cases, alone)

    @cached_property
    def reference(self) -> KFACReference:
        """The oracle's word on all samples."""
        return KFACReference(self.subject)

    @property
    def splits(self) -> dict[str, list[int]]:
        """{how: samples of every process}, the same number in all.

        Torch cannot run a tensor-parallel layer on an empty batch that has an axis of positions.
        """
        counts = _dealt(self.layout.data)
        if len(counts) == 1 or (self.layout.tensor_parallel and self.subject.causal):
            return {"": counts}
        return {"": counts, "an empty rank": [counts[0] + counts[-1], *counts[1:-1], 0]}

    @property
    def reductions(self) -> list[str]:
        """Those of the cases."""
        return list(dict.fromkeys(case.reduction for case in self.cases))

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Spread over the processes."""
        model = self.subject.model(self.layout.where.device, dtype)
        return self.layout.place(model, LINEARS[self.subject.name] if self.layout.tensor_parallel else None)

    def batch(self, counts: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """This process's inputs, labels and global ids."""
        x, y = self.subject.batch(self.layout.where.device, dtype)
        start = sum(counts[: self.layout.rank])
        ids = torch.arange(start, start + counts[self.layout.rank], device=x.device)
        return x[ids], y[ids], ids

    def capture(self, kfac: KFACNaturalGradient, model: nn.Module, counts: Sequence[int], **options: Any) -> None:
        """One backward of a summed loss inside a capture."""
        x, y, ids = self.batch(counts, **options)
        model.zero_grad()
        with kfac.capture(model, num_terms=y.numel(), loss_reduction="sum", sample_ids=ids):
            cross_entropy(model, x, y, "sum").backward()

    # ---- against the oracle ----

    def factors(self) -> Iterator[Comparison]:
        """A and G of every reduction and policy."""
        model = self.model()
        chosen = dict.fromkeys((case.reduction, case.policy) for case in self.cases)
        for (how, counts), (reduction, policy) in itertools.product(self.splits.items(), chosen):
            kfac = make_kfac(policy=policy, kfac_distributed_reduce=reduction)
            self.capture(kfac, model, counts)
            case = ", ".join(part for part in (reduction, policy, how) if part)
            yield from compare_factors(kfac, self.reference.blocks, case)

    def natural(self, mode: str) -> Iterator[Comparison]:
        """(F + damping)^p ∇ of every reduction and policy, with the clip and without; ∇ as it is left in `p.grad`."""
        model = self.model()
        counts = _dealt(self.layout.data)
        mean = self.layout.data / self.reference.terms  # they divide by W what was summed over N terms
        for case in (case for case in self.cases if case.mode == mode):
            kfac = make_kfac(mode, case.policy, case.clip, kfac_distributed_reduce=case.reduction)
            self.capture(kfac, model, counts)
            for power, said in POWERS.items():
                found = kfac.compute_natural_gradient(model, power)
                natural = {name: mean * whole(t) for name, t in found.items()}
                for name, block in kfac.kfac_factors.items():
                    damping = raised_damping(block, mode)
                    clip = case.clip and damping is None
                    wanted = self.reference.natural(name, mode, power, clip, damping or DAMPING)
                    error = relative_error(as_matrix(block, natural), wanted)
                    declared = "" if damping is None else "clip by a larger damping"
                    yield Comparison(name, f"{case.label}, power {said}", error, declared)

    def exact_head(self) -> Iterator[Comparison]:
        """The head's G from the softmax."""
        model, reference = self.model(), KFACReference(self.subject, exact_head=True)
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):
            kfac = make_kfac(kfac_distributed_reduce=reduction, kfac_true_fisher_head=True)
            self.capture(kfac, model, counts)
            yield from compare_factors(kfac, reference.blocks, ", ".join(part for part in (reduction, how) if part))

    def half_precision(self) -> Iterator[Comparison]:
        """Factors at rest in half precision, in units of what they may be off: √r times what the record says.

        Sides of a tied weight are added up of rounded ones, in float32: they may be off by the rounding of these.
        """
        model = self.model()
        for (said, dtype), reduction in itertools.product(HALF.items(), self.reductions):
            kfac = make_kfac(kfac_distributed_reduce=reduction, woodbury_dtype=said)
            self.capture(kfac, model, _dealt(self.layout.data))
            for name, block in kfac.kfac_factors.items():
                wanted = self.reference.blocks[name]
                for side, factor in block.factors.items():
                    exact = wanted.A if side == "A" else wanted.G
                    assert exact is not None
                    summed = factor.storage_dtype == torch.float32
                    rounding = torch.finfo(dtype).eps if summed else float(factor.quantisation_error)
                    error = relative_error(factor.to_dense(), exact) / (factor.rank**0.5 * rounding + TOLERANCE)
                    yield Comparison(f"{name} {side}", f"{said}, {reduction}", error)

    # ---- against the library on one process ----

    def drawn_labels(self) -> Iterator[Comparison]:
        """Labels belong to a sample's id, whoever holds it."""
        model = self.model()
        x, y = self.subject.batch(self.layout.where.device)
        ids = torch.arange(len(x), device=x.device)
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):

            def collect(kfac: KFACNaturalGradient, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor) -> None:
                kfac.collect_kfac_factors(model, (x, y), "mc", n_samples=2, causal_shift=False, sample_ids=ids)

            together, one = make_kfac(kfac_distributed_reduce=reduction), make_kfac(process_group=self.alone)
            collect(together, model, *self.batch(counts))
            collect(one, self.subject.model(x.device), x, y, ids)
            yield from _same_factors(together, one, ", ".join(part for part in ("mc", reduction, how) if part))

    def subset(self) -> Iterator[Comparison]:
        """The tokens with the smallest keys of all processes are those that one process keeps."""
        model = self.model()
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):
            together = make_kfac(kfac_distributed_reduce=reduction, max_tokens=SUBSET)
            self.capture(together, model, counts)
            one = self._alone(max_tokens=SUBSET)
            yield from _same_factors(together, one, ", ".join(part for part in (reduction, how) if part))

    def float32(self) -> Iterator[Comparison]:
        """A float32 model with factors in float32."""
        model, one = self.model(torch.float32), self._alone(torch.float32, woodbury_dtype="fp32")
        for (how, counts), reduction in itertools.product(self.splits.items(), self.reductions):
            together = make_kfac(kfac_distributed_reduce=reduction, woodbury_dtype="fp32")
            self.capture(together, model, counts, dtype=torch.float32)
            yield from _same_factors(together, one, ", ".join(part for part in (reduction, how) if part))

    def _alone(self, dtype: torch.dtype = torch.float64, **options: Any) -> KFACNaturalGradient:
        """One process's answer on all samples."""
        kfac = make_kfac(process_group=self.alone, **options)
        model = self.subject.model(self.layout.where.device, dtype)
        x, y = self.subject.batch(self.layout.where.device, dtype)
        with kfac.capture(model, num_terms=y.numel(), loss_reduction="sum"):
            cross_entropy(model, x, y, "sum").backward()
        return kfac


def _dealt(processes: int) -> list[int]:
    """Samples of every process."""
    return [SAMPLES[rank % len(SAMPLES)] for rank in range(processes)]


def _same_factors(together: KFACNaturalGradient, one: KFACNaturalGradient, case: str) -> Iterator[Comparison]:
    """Every side of every block; a block that is missing on either side is an error."""
    if set(together.kfac_factors) != set(one.kfac_factors):
        raise ValueError(f"blocks {sorted(together.kfac_factors)}, expected {sorted(one.kfac_factors)}")
    for name, block in together.kfac_factors.items():
        for side, factor in block.factors.items():
            wanted = one.kfac_factors[name].factors[side].to_dense()
            yield Comparison(f"{name} {side}", case, relative_error(factor.to_dense(), wanted))


def plan(
    layout: ModelLayout, models: Sequence[str] = tuple(SUBJECTS), cases: Sequence[ProcessCase] = CASES
) -> list[VerifyCheck]:
    """Every check of K-FAC on several processes, model by model; nothing is computed yet. The checks are collective.

    Args:
        layout: this process among the others.
        models: names in `SUBJECTS`; of those without layers to share, none where layers are shared.
        cases: a sample of them makes the run shorter.

    Returns:
        Checks, to be run by `run_checks`, in the same order on every process.
    """
    alone, _ = dist.new_subgroups(group_size=1) if layout.where.size > 1 else (None, None)
    found = []
    for name in models:
        if layout.tensor_parallel and name not in LINEARS:
            continue
        bench = _Bench.of(name, layout, tuple(cases), alone)
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
