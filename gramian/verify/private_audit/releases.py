"""Releases of a short run of the audited config: noise as large as accounted, never used twice, records as rarely drawn.

The noise of a release is what the step's hook added: the noised sum that the optimizer sees, times the expected batch, minus
the clipped sums that the backwards left. A part of every parameter's places is looked at.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gramian.data import Windows
from gramian.privacy.audit.release_tests import (
    grouped_p_value,
    participation_p_value,
    reuse_p_value,
    variance_p_value,
)
from gramian.privacy.noise.noise_strategy import NoiseStrategy
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE, AuditFinding
from gramian.verify.private_audit.audited_run import AuditedRun

RELEASES, PARTICIPATIONS = 20, 80
"""Number of releases at least, and of participations of records that are expected in all of them."""
FIRST, SPREAD = 1024, 1024
"""Number of places of each parameter that are looked at: its first ones, and others spread over all of it."""


class _Numbered(Dataset[dict[str, Any]]):
    """Windows whose items also have their number, as "record"."""

    def __init__(self, windows: Windows) -> None:
        self._windows, self.stack = windows, windows.stack

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._windows[index], "record": index}


class _Watched:
    """The noise of every release of a stepper, in units of σC, at the places that are looked at: {parameter: [[N] …]}.

    C is the clip norm of the release, which "adaptive" changes.
    """

    def __init__(self, stepper: PrivateStepper, noise_multiplier: float) -> None:
        self.noise: dict[str, list[Tensor]] = {}
        self._stepper, self._sigma, self._std = stepper, noise_multiplier, 1.0
        self._trained = {name: p for name, p in stepper.module.named_parameters() if p.requires_grad}
        self._places = {name: _places(p.numel()).to(p.device) for name, p in self._trained.items()}
        self._sums: dict[str, Tensor] = {}
        hooks: Any = stepper.optimizer._optimizer_step_pre_hooks
        before = stepper.optimizer.register_step_pre_hook(self._before_noise)
        hooks.move_to_end(before.id, last=False)
        stepper.optimizer.register_step_pre_hook(self._after_noise)

    def _before_noise(self, *step: Any) -> None:
        self._std = self._sigma * self._stepper.engine.clip_norm
        for name, values in self._now():
            self._sums[name] = self._sums.get(name, 0) + values

    def _after_noise(self, *step: Any) -> None:
        if self._stepper.engine.stepped:
            for name, values in self._now():
                noise = values * self._stepper.engine.expected_batch - self._sums.get(name, 0)
                self.noise.setdefault(name, []).append((noise / self._std).cpu())
            self._sums.clear()

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        """Values at the places that are looked at; in a metric W those of W times the gradient, whose noise is σ·C·z."""
        found = {name: p.grad.detach().double() for name, p in self._trained.items() if p.grad is not None}
        for name, whole in self._stepper.engine.whitened(found).items():
            yield name, whole.reshape(-1)[self._places[name]]


def check_releases(run: AuditedRun, releases: int | None = None) -> list[AuditFinding]:
    """Make releases with the run's config and a new key, and test them; None: as many as the tests need."""
    batch, records, rate = run.config.data.batch, len(run.windows), run.sample_rate
    count = releases or max(RELEASES, -(-PARTICIPATIONS // batch))
    if run.privacy.noise == "bandmf":  # which has a row for each release of the run, and no more
        count = min(count, run.config.run.steps)
    draws: list[list[int]] = []
    with run.private(_Numbered(run.windows)) as stepper:
        watched = _Watched(stepper, _noise_of_gradients(run) or 1.0)
        for draw in stepper.draws():
            draws.append([])

            def seen(pieces: Any = draw.pieces, drawn: list[int] = draws[-1]) -> Iterator[Any]:
                for piece in pieces:
                    drawn += piece["record"].tolist()
                    yield piece

            stepper.take(replace(draw, pieces=seen()), run.config.optimizer.lr)
            if len(draws) == count:
                break
        groups = stepper.groups_of_records()
    noise = {name: [*_decorrelated(run, rows)] for name, rows in watched.noise.items()}
    return [
        _variance(run, noise),
        _reuse(noise),
        _participation(draws, records, rate, groups),
    ]


def _decorrelated(run: AuditedRun, rows: list[Tensor]) -> Any:
    """The independent draws z = C y of which the noise y [releases] of a run with a new key is made."""
    y_RN = torch.stack(rows).numpy()
    if run.privacy.bands is None:
        return y_RN
    c_R = NoiseStrategy.of(run.privacy.noise, run.privacy.bands, run.config.run.steps).column(len(rows))
    return np.stack([c_R[: t + 1][::-1] @ y_RN[: t + 1] for t in range(len(rows))])


def _noise_of_gradients(run: AuditedRun) -> float:
    """σ of the sums: that of the account, but for "adaptive", whose σ pays for a count with noise σ_b as well.

    With σ_b = expected batch/20 that is (σ⁻² − (2σ_b)⁻²)^(−½).
    """
    if run.privacy.clip_function != "adaptive" or not run.noise_multiplier:
        return run.noise_multiplier
    return float((run.noise_multiplier**-2 - (run.config.data.batch / 10) ** -2) ** -0.5)


def _variance(run: AuditedRun, noise: dict[str, list[Any]]) -> AuditFinding:
    if not run.noise_multiplier:
        return AuditFinding(
            "noise", False, "noise_multiplier is 0: there is no noise, and ε is infinite", {"p_value": 0.0}
        )
    groups = [np.concatenate(rows) for rows in noise.values()]
    p_value, variance = variance_p_value(groups)
    says = (
        f"its variance, over {sum(map(len, groups)):,} numbers, in the one of {len(groups)} parameters where it differs most "
        f"from the accounted (σC)², is {variance:.4g} of it (p = {p_value:.2g})"
    )
    return _tested("noise", p_value, says, {"variance_over_accounted": variance, "numbers": sum(map(len, groups))})


def _reuse(noise: dict[str, list[Any]]) -> AuditFinding:
    by_release_RN = np.stack([np.concatenate(rows) for rows in zip(*noise.values(), strict=True)])
    first_PN = np.full((len(noise), FIRST), np.nan)
    for row, releases in zip(first_PN, noise.values(), strict=True):
        head = releases[0][:FIRST]
        row[: len(head)] = head
    found = [reuse_p_value(by_release_RN), reuse_p_value(first_PN)]
    p_value, correlation = min(found)
    says = (
        f"the largest correlation between the noise of two of {len(by_release_RN)} releases, or of two of {len(noise)} "
        f"parameters of one release, is {correlation:.3g} (p = {min(1.0, 2 * p_value):.2g})"
    )
    return _tested("reuse", min(1.0, 2 * p_value), says, {"largest_correlation": correlation})


def _participation(draws: list[list[int]], records: int, rate: float, groups: Any) -> AuditFinding:
    drawn, alike = sum(map(len, draws)), "of all records alike"
    if groups is None:
        p_value = participation_p_value(draws, records, rate)
    else:
        count, of = groups
        p_value, alike = grouped_p_value(draws, of, count, rate * count), f"of {count} groups in turn, records alike"
    says = (
        f"{len(draws)} draws from {records:,} records took a share of {drawn / len(draws) / records:.4g} on average; "
        f"accounted is {rate:.4g}, {alike}, independently (p = {p_value:.2g})"
    )
    facts = {"drawn": drawn, "draws": len(draws), "rate": drawn / len(draws) / records, "accounted_rate": rate}
    return _tested("participation", p_value, says, facts)


def _tested(name: str, p_value: float, says: str, facts: dict[str, Any]) -> AuditFinding:
    passed = p_value >= SIGNIFICANCE
    return AuditFinding(name, passed, says if passed else f"NOT as accounted: {says}", {"p_value": p_value, **facts})


def _places(count: int) -> Tensor:
    """Places [N] of a parameter of `count` elements that are looked at, ascending."""
    spread = torch.linspace(0, count - 1, SPREAD, dtype=torch.float64).round().long()
    return torch.unique(torch.cat([torch.arange(min(count, FIRST)), spread]))  # type: ignore[no-any-return]
