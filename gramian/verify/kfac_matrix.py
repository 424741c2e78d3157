"""Checks of K-FAC against a dense reference: small float64 models times storage policies, damping modes, powers and the clip.

Each check compares factors or natural gradients of the library with those of `KFACReference`, as relative errors.

Legend: B samples, T tokens, O outputs, M inputs with the bias, V classes.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
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
from gramian.verify.kfac_reference import KFACReference
from gramian.verify.kfac_subjects import IGNORE, SUBJECTS, KFACSubject, cross_entropy

TOLERANCE = 1e-10
"""Largest relative error of results in float64 on one device."""
DEVICES_FLOAT64 = 1e-8
DEVICES_FLOAT32 = 1e-5
STANDARD_ERRORS = 5.0
"""Largest deviation of label frequencies, in standard errors; labels of a neighbouring position would be off by about 20."""
POWERS = {-1.0: "-1", -0.5: "-1/2", 0.5: "1/2", 1.0: "1"}
DRAWS, CONTRAST = 32, 4.0
"""Number of draws of labels in the check of their frequencies, and the factor on the head's weight that makes positions differ.
"""


@dataclass(frozen=True)
class KFACCase:
    """Options of one natural-gradient comparison: storage policy, damping mode, condition-number clip, power."""

    policy: str
    mode: str
    clip: bool
    power: float

    @property
    def label(self) -> str:
        """Name of the case in tables: policy, power, and whether the clip is on."""
        return f"{self.policy}, power {POWERS.get(self.power, self.power)}{', clip' if self.clip else ''}"


CASES = tuple(KFACCase(*which) for which in itertools.product(POLICIES, DAMPING_MODES, (False, True), POWERS))


def _capture(
    kfac: KFACNaturalGradient,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    reduction: str = "mean",
    scale: float = 1.0,
    **options: Any,
) -> None:
    """Run one backward of `scale` times the model's loss inside `kfac.capture(…, **options)`, which computes the factors."""
    model.zero_grad()
    options = {"loss_reduction": reduction, **options}
    with kfac.capture(model, num_terms=y.numel(), **options):
        (scale * cross_entropy(model, x, y, reduction)).backward()


@dataclass(frozen=True)
class _Bench:
    """The checks of K-FAC on one model and one device."""

    subject: KFACSubject
    device: torch.device
    cases: tuple[KFACCase, ...]

    @cached_property
    def reference(self) -> KFACReference:
        """The dense reference of K-FAC, shared by all checks of this model."""
        return KFACReference(self.subject)

    @property
    def policies(self) -> list[str]:
        """Storage policies that occur in the cases."""
        return list(dict.fromkeys(case.policy for case in self.cases))

    @property
    def extremes(self) -> list[KFACCase]:
        """Cases of the two extreme policies: all factors may be low-rank ("all"), or none ("small_only")."""
        return [case for case in self.cases if case.policy in ("all", "small_only")]

    def library(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float64
    ) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, and inputs and labels of its batch, on a device (None: that of this bench) and in a dtype."""
        where = device or self.device
        return self.subject.model(where, dtype), *self.subject.batch(where, dtype)

    def factors(self) -> Iterator[Comparison]:
        """Compare the K-FAC factors A and G of all layers with the reference under every storage policy."""
        return self._factors(self.reference)

    def natural(self, mode: str) -> Iterator[Comparison]:
        """Compare natural gradients with the reference, in all cases of damping mode `mode`."""
        return self._natural([case for case in self.cases if case.mode == mode], self.reference)

    def exact_head(self) -> Iterator[Comparison]:
        """Compare factors with the exact softmax G of the head, and the head's natural gradient, with the reference."""
        reference = KFACReference(self.subject, exact_head=True)
        yield from self._factors(reference, kfac_true_fisher_head=True)
        for comparison in self._natural(self.extremes, reference, kfac_true_fisher_head=True):
            if comparison.layer in (self.subject.head, "token_embedding"):
                yield comparison

    def _factors(self, reference: KFACReference, **options: Any) -> Iterator[Comparison]:
        model, x, y = self.library()
        for policy in self.policies:
            kfac = make_kfac(policy=policy, **options)
            _capture(kfac, model, x, y)
            yield from compare_factors(kfac, reference.blocks, policy)

    def _natural(self, cases: Sequence[KFACCase], reference: KFACReference, **options: Any) -> Iterator[Comparison]:
        model, x, y = self.library()
        for (policy, mode, clip), group in itertools.groupby(cases, lambda c: (c.policy, c.mode, c.clip)):
            kfac = make_kfac(mode, policy, clip, **options)
            _capture(kfac, model, x, y)
            for case in group:
                natural = kfac.compute_natural_gradient(model, case.power)
                yield from compare_natural(kfac, natural, reference, mode, case.power, clip, case.label)

    # ---- Monte Carlo labels ----

    def mc_labels(self) -> Iterator[Comparison]:
        """Check that labels are drawn only where the batch has labels, and that factors are those of the drawn labels."""
        _, gradients, counted, kfac = self._drawn(1)
        labels = gradients[0].argmin(-1).masked_fill(~gradients[0].any(-1), IGNORE)
        wrong = int((labels != IGNORE).ne(counted).sum())
        yield Comparison("labelled positions", "mc", float(wrong))
        yield from compare_factors(kfac, KFACReference(self.subject, labels).blocks, "mc")

    def mc_frequencies(self) -> Iterator[Comparison]:
        """Compare Σ log p(label) over draws and positions with its expectation, in standard errors."""
        logits, gradients, counted, _ = self._drawn(DRAWS, CONTRAST)
        log_p = logits.log_softmax(-1)
        mean = (log_p.exp() * log_p).sum(-1)
        variance = (log_p.exp() * (log_p - mean[..., None]).square()).sum(-1)
        drawn = torch.stack([log_p.gather(-1, g.argmin(-1)[..., None])[..., 0] - mean for g in gradients])
        deviation = float((len(gradients) * variance[counted].sum()).sqrt())
        yield Comparison("all positions", f"{len(gradients)} draws", abs(float(drawn[:, counted].sum())) / deviation)

    def _drawn(self, draws: int, contrast: float = 1.0) -> tuple[Tensor, list[Tensor], Tensor, KFACNaturalGradient]:
        """Draw labels `draws` times; returns logits, their gradient of each draw, counted positions, and the K-FAC object.

        A plain torch hook on the head records the gradients softmax(logits) − one-hot(label), which show the drawn labels.
        Gradients of earlier backwards, which test that rows of the batch do not mix, are left out.
        """
        model, x, y = self.library()
        head = model.get_submodule(self.subject.head)
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.mul_(contrast)
        labels = y.clone()
        if self.subject.causal:
            labels[0, :2] = IGNORE
            labels[-1, -2:] = IGNORE
            last = torch.full_like(labels[:, :1], IGNORE)
            counted = torch.cat([labels[:, 1:], last], dim=1) != IGNORE
            batch: Any = {"input_ids": x, "labels": labels, "attention_mask": torch.ones_like(x)}
        else:
            labels[1] = IGNORE
            counted, batch = labels != IGNORE, (x, labels)
        seen: list[Tensor] = []
        logits: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            logits.append(output.detach().cpu())
            if output.requires_grad:
                output.register_hook(lambda gradient: seen.append(gradient.detach().cpu()))

        handle = head.register_forward_hook(note)
        kfac = make_kfac()
        try:
            kfac.collect_kfac_factors(model, batch, "mc", n_samples=draws, causal_shift=self.subject.causal)
        finally:
            handle.remove()
        return logits[-1], seen[-draws:], counted.cpu(), kfac

    # ---- invariances ----

    def twice(self) -> Iterator[Comparison]:
        """Check that a batch repeated twice gives the same factors and the same natural gradient."""
        model, x, y = self.library()
        for mode in DAMPING_MODES:
            yield from self._same(model, mode, "batch twice", (torch.cat([x, x]), torch.cat([y, y])))

    def reductions(self) -> Iterator[Comparison]:
        """Check that factors do not depend on the loss's reduction or scale, and natural gradients scale as the gradient."""
        model, x, y = self.library()
        terms = y.numel()
        for mode in DAMPING_MODES:
            yield from self._same(model, mode, "sum", (x, y), terms, reduction="sum")
            yield from self._same(model, mode, "coefficient", (x, y), 3.0, scale=3.0, loss_reduction=3.0 / terms)
            yield from self._same(model, mode, "loss scale", (x, y), 1024.0, scale=1024.0, loss_scale=1024.0)

    def _same(
        self, model: nn.Module, mode: str, what: str, batch: tuple[Tensor, Tensor], factor: float = 1.0, **how: Any
    ) -> Iterator[Comparison]:
        """Compare factors and natural gradient of `batch`, whose gradient is `factor` times larger, with the plain batch's.

        `mode` is the damping mode, `what` the name of the case, `how` are options of `_capture` for `batch`.
        """
        plain, other = make_kfac(mode), make_kfac(mode)
        _capture(plain, model, *self.subject.batch(self.device))
        natural = plain.compute_natural_gradient(model)
        _capture(other, model, *batch, **how)
        changed = other.compute_natural_gradient(model)
        yield from compare_kfac(other, plain, f"{what}, {mode}")
        for name, value in changed.items():
            yield Comparison(name, f"{what}, {mode}", relative_error(value / factor, natural[name]))

    # ---- two devices ----

    def devices_float64(self) -> Iterator[Comparison]:
        """Compare natural gradients in float64 on this device and on the CPU."""
        for (policy, mode, clip), group in itertools.groupby(self.extremes, lambda c: (c.policy, c.mode, c.clip)):
            sides = []
            for device in (self.device, torch.device("cpu")):
                model, x, y = self.library(device)
                kfac = make_kfac(mode, policy, clip)
                _capture(kfac, model, x, y)
                sides.append((kfac, model))
            for case in group:
                here, there = (kfac.compute_natural_gradient(model, case.power) for kfac, model in sides)
                for name, value in here.items():
                    yield Comparison(name, f"{mode}, {case.label}", relative_error(value, there[name]))

    def devices_float32(self) -> Iterator[Comparison]:
        """Compare the factors of a float32 model, stored in float32, on this device and on the CPU."""
        with _no_tf32():
            for policy in self.policies:
                sides = []
                for device in (self.device, torch.device("cpu")):
                    kfac = make_kfac(policy=policy, woodbury_dtype="fp32")
                    _capture(kfac, *self.library(device, torch.float32))
                    sides.append(kfac)
                yield from compare_kfac(sides[0], sides[1], policy)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Context manager: compute in full float32 precision, without TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def plan(
    device: torch.device | None = None, models: Sequence[str] = tuple(SUBJECTS), cases: Sequence[KFACCase] = CASES
) -> list[VerifyCheck]:
    """List the checks of K-FAC, model by model; nothing is computed yet.

    The library runs on `device` (None: a GPU if there is one, else the CPU), the reference on the CPU. Fewer `cases` make the
    run shorter.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[VerifyCheck] = []
    for name in models:
        bench, check = _Bench(SUBJECTS[name], device, tuple(cases)), partial(VerifyCheck, name)
        found += [check("factors A and G", TOLERANCE, bench.factors)]
        for mode in dict.fromkeys(case.mode for case in cases):
            found += [check(f"natural gradient, {mode} damping", TOLERANCE, partial(bench.natural, mode))]
        found += [
            check("exact softmax head", TOLERANCE, bench.exact_head),
            check("Monte Carlo labels", TOLERANCE, bench.mc_labels),
            check("Monte Carlo frequencies", STANDARD_ERRORS, bench.mc_frequencies, unit="s.e."),
            check("the batch twice", TOLERANCE, bench.twice),
            check("mean, sum, coefficient, loss scale", TOLERANCE, bench.reductions),
        ]
        if device.type != "cpu":
            between = f"CPU and {device.type.upper()}"
            found += [
                check(f"{between}, natural gradient", DEVICES_FLOAT64, bench.devices_float64),
                check(f"{between}, fp32 factors", DEVICES_FLOAT32, bench.devices_float32),
            ]
    return found
