"""Memory of a curvature analysis, from shapes alone: K-FAC's memory plan, and the vectors of Lanczos and of the quadrature."""

from dataclasses import dataclass
from typing import Any

import torch

from gramian.analysis.options import Settings
from gramian.analysis.subject import Subject
from gramian.core.byte_amounts import format_bytes
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.memory.curvature_plan import CurvatureRow
from gramian.linalg import WIDEST_DENSE
from gramian.plan.budget import Budget
from gramian.plan.host_memory import available_memory

WORK = 6
"""Number of float64 vectors of parameter length that Lanczos needs beside its basis: a product, its residual, temporaries."""
BLOCK = 2**30
"""The quadrature runs several probes at once as long as their Lanczos bases take at most this many bytes."""


@dataclass(frozen=True)
class AnalysisPlan:
    """Bytes that every stage of an analysis needs on the model's device; stages run one after another."""

    table: str
    """Table of K-FAC's memory as text, with one line for all layers of one shape."""
    stages: dict[str, int]
    """{name of the stage: bytes that it needs}."""
    device: torch.device

    @property
    def most(self) -> int:
        """Bytes of the stage that needs the most."""
        return max(self.stages.values())

    def lines(self) -> list[str]:
        """The plan as lines of text for the terminal: K-FAC's table, then the bytes of every stage."""
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in self.stages.items())
        return [
            *self.table.splitlines(),
            f"stages one after another: {parts}; {format_bytes(self.most)} at most on top of the model and its activations",
        ]

    def facts(self) -> dict[str, Any]:
        """The plan as a JSON object: bytes of every stage, their maximum, and the device."""
        return {"stages": dict(self.stages), "most": self.most, "device": self.device.type}

    def shortage(self) -> str:
        """What does not fit into the free memory of the device, with the bytes needed and the bytes free; "" if all fits."""
        free = Budget(_free(self.device))
        if free.fits(self.most):
            return ""
        largest = max(self.stages, key=lambda name: self.stages[name])
        return f"{largest} takes {format_bytes(self.most)}, {free} are free on the {_device_name(self.device)}"


def make_plan(subject: Subject, settings: Settings, kfac: KFACNaturalGradient) -> AnalysisPlan:
    """Plan the memory of an analysis of `subject` with `settings`; `kfac` is its K-FAC object. Nothing is allocated."""
    first = next(subject.model.parameters())
    planned = kfac.plan(subject.model, tokens=subject.tokens, fisher_type=settings.fisher, fit=True)
    planned_bytes = planned.totals[first.device.type].stages()
    decomposed = max((_decomposed(row) for row in planned.rows), default=0)
    n, item = subject.parameters, first.element_size()
    rest = planned_bytes["rest"]
    stages = {"K-FAC": planned_bytes["collect"] + planned_bytes["build"] + rest, "its spectra": rest + decomposed}
    if settings.probes or settings.hessian:
        stages["Lanczos"] = (min(n, settings.lanczos_basis) + 1) * n * item + WORK * 8 * n
    if settings.probes:
        steps = min(settings.steps, n)
        together = min(settings.probes, max(1, BLOCK // (steps * n * item)))
        stages["density"] = together * (steps * n * item + WORK * 8 * n)
    return AnalysisPlan(planned.grouped(), stages, first.device)


def _decomposed(row: CurvatureRow) -> int:
    """Bytes while the widest matrix of a K-FAC block is decomposed.

    n × n matrices take 3·8·n² bytes; a side that is too wide for that takes 64 float64 vectors of its width.
    """
    if not row.tokens:
        return 0
    if row.G.startswith("diagonal ") and row.outputs > WIDEST_DENSE:
        return max(64 * 8 * row.outputs, 24 * min(row.inputs, row.tokens) ** 2)
    exact = row.outputs if row.G.startswith("diagonal ") else min(row.outputs, row.tokens)
    return 24 * max(exact, min(row.inputs, row.tokens)) ** 2


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else "GPU"


def _free(device: torch.device) -> int | None:
    """Free bytes of a device; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return available_memory()
    except (OSError, KeyError, ValueError):  # not Linux
        return None
