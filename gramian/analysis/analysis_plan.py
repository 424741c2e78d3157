"""What an analysis will hold, from shapes alone: K-FAC's own plan, and the bases of Lanczos and of the quadrature."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from gramian.analysis.options import Settings
from gramian.analysis.subject import Subject
from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.memory.curvature_plan import CurvatureRow
from gramian.linalg import WIDEST_DENSE

WORK = 6
"""Vectors as long as the parameters, in float64, beside a basis: a product, its residual and what becomes of them."""
BLOCK = 2**30
"""Bytes up to which the quadrature runs several probes at once."""


@dataclass(frozen=True)
class AnalysisPlan:
    """Bytes of every stage on the device of the model; the most is that of the dearest one."""

    table: str
    """K-FAC's, one line for blocks alike."""
    stages: dict[str, int]
    device: torch.device

    @property
    def most(self) -> int:
        """Bytes of the dearest stage."""
        return max(self.stages.values())

    def lines(self) -> list[str]:
        """For people."""
        parts = ", ".join(f"{name} {format_bytes(held)}" for name, held in self.stages.items())
        return [
            *self.table.splitlines(),
            f"stages one after another: {parts}; {format_bytes(self.most)} at most on top of the model and its activations",
        ]

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {"stages": dict(self.stages), "most": self.most, "device": self.device.type}

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            GramianError: with both amounts.
        """
        free = _free(self.device)
        if free is not None and self.most > free:
            dearest = max(self.stages, key=lambda name: self.stages[name])
            raise GramianError(
                f"memory: {dearest} takes {format_bytes(self.most)}, {format_bytes(free)} are free; "
                "expected fewer --eigenvalues, --steps or --tokens, or --probes 0"
            )


def make_plan(subject: Subject, settings: Settings, kfac: KFACNaturalGradient) -> AnalysisPlan:
    """The plan; nothing is allocated."""
    first = next(subject.model.parameters())
    planned = kfac.plan(subject.model, tokens=subject.tokens, fisher_type=settings.fisher)
    held = planned.totals[first.device.type].stages()
    decomposed = max((_decomposed(row) for row in planned.rows), default=0)
    n, item = subject.parameters, first.element_size()
    stages = {"K-FAC": held["collect"] + held["build"] + held["rest"], "its spectra": held["rest"] + decomposed}
    if settings.probes or settings.hessian:
        stages["Lanczos"] = (min(n, settings.lanczos_basis) + 1) * n * item + WORK * 8 * n
    if settings.probes:
        steps = min(settings.steps, n)
        together = min(settings.probes, max(1, BLOCK // (steps * n * item)))
        stages["density"] = together * (steps * n * item + WORK * 8 * n)
    return AnalysisPlan(planned.grouped(), stages, first.device)


def _decomposed(row: CurvatureRow) -> int:
    """Bytes while the widest matrix of a block is decomposed: 3·8·n², 64 vectors of a side that is too wide for that."""
    if not row.tokens:
        return 0
    if row.G.startswith("diagonal ") and row.outputs > WIDEST_DENSE:
        return max(64 * 8 * row.outputs, 24 * min(row.inputs, row.tokens) ** 2)
    exact = row.outputs if row.G.startswith("diagonal ") else min(row.outputs, row.tokens)
    return 24 * max(exact, min(row.inputs, row.tokens)) ** 2


def _free(device: torch.device) -> int | None:
    """Bytes that can still be had; None: not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            told = dict(line.split(":", 1) for line in lines)
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError):
        return None
