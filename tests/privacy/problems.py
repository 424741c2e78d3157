"""What the tests of private training share: a private run of a case, and the loop's answer to it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.oracles.clipped_sum import ClippedSum, clip
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.models import Batch
from tests.kit.private import attach
from tests.statistics.problems import Problem

RECORDS = 40
"""Of the data sets here; sample rates follow."""


ATTACHED: list[gramian.PrivacyEngine] = []
"""Engines that `tests/privacy/conftest.py` detaches after a test: they watch every optimizer's step until then."""


@dataclass
class Run:
    """A model that trains privately."""

    engine: gramian.PrivacyEngine
    model: nn.Module
    optimizer: Optimizer
    loader: Any

    def gradients(self) -> dict[str, Tensor]:
        """`p.grad` of every trained parameter; zeros where there is none."""
        return gradients(self.model)


@contextmanager
def private(
    model: nn.Module,
    max_grad_norm: float,
    *,
    optimizer: Optimizer | None = None,
    data: Sequence[Tensor] = (),
    batch_size: int = 4,
    engine: gramian.PrivacyEngine | None = None,
    noise_multiplier: float = 0.0,
    poisson_sampling: bool = False,
    **options: Any,
) -> Iterator[Run]:
    """A private run without noise, whose loader is plain unless told; SGD at lr 1. Detached at the end."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loader = DataLoader(TensorDataset(*(data or [torch.zeros(RECORDS, 1)])), batch_size=batch_size)
    engine = engine or gramian.PrivacyEngine()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling: is off")
        made = attach(
            engine, model, loader, optimizer=optimizer, noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm, poisson_sampling=poisson_sampling, **options,
        )  # fmt: skip
    try:
        yield Run(engine, *made)
    finally:
        if engine._installed is not None:
            engine.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """`p.grad` of every trainable parameter; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, copied."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def clip_norm(p: Problem) -> float:
    """A clip norm that clips half of the samples."""
    norms = p.norms()
    return float(norms.sort().values[(len(norms) - 1) // 2] + norms.sort().values[len(norms) // 2]) / 2


def wanted(
    p: Problem, max_grad_norm: float, index: slice | Sequence[int] = slice(None), dtype: torch.dtype | None = None
) -> ClippedSum:
    """The loop's clipped sum over some of a problem's samples.

    At the clip norm that is aimed at: below C by the slack that is declared for the dtype in which gradients are formed. The
    matrix holds the whole sum against C itself; parameters in which clipped and unclipped samples cancel show the slack more.
    """
    formed = dtype or (torch.float32 if p.case.computes_in_float32 and p.dtype == torch.float64 else p.dtype)
    return clip({name: g[index] for name, g in p.gradients.items()}, max_grad_norm / (1 + SLACK[formed]))


def reduced(p: Problem, model: nn.Module, batch: Batch, reduction: str | float) -> Tensor:
    """The batch's loss, as `loss_reduction` says."""
    if isinstance(reduction, str):
        return p.case.loss(model, *batch, reduction=reduction)
    return reduction * p.case.loss(model, *batch, reduction="sum")


def largest_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """‖actual − expected‖ / ‖expected‖ over all parameters together; NaN counts as infinite."""
    assert actual.keys() == expected.keys()
    difference = torch.cat([(actual[name].double() - want.double()).flatten() for name, want in expected.items()])
    size = torch.cat([want.double().flatten() for want in expected.values()]).norm()
    error = float(difference.norm() / size) if size else float(difference.norm())
    return error if error == error else float("inf")


def assert_totals(model: nn.Module, want: ClippedSum) -> None:
    """`p.grad` is the loop's clipped sum."""
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want.totals[name])


def assert_sums(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """The same names, and every parameter within the tolerance, relative to its norm and, tiny ones, to the whole's."""
    assert actual.keys() == expected.keys()
    whole = float(torch.cat([want.double().flatten() for want in expected.values()]).norm())
    for name, want in expected.items():
        assert actual[name].shape == want.shape, name
        error, size = float((actual[name].double() - want.double()).norm()), float(want.double().norm())
        allowed = tolerance * (size + 1e-2 * whole)
        assert error <= allowed, f"{name}: off by {error:.3g} of {size:.3g}"
