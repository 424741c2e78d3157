"""The coverage report of a capture: which parameters' gradients it captured, by which kind of layer and algorithm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gramian.plan.plan_table import PlanTable


@dataclass(frozen=True)
class Cover:
    """Whether and how a capture computed the per-sample gradients of one parameter."""

    status: Literal["covered", "frozen", "unused", "left out"]
    """Covered: its gradients were captured; frozen: it requires none; unused: it does, but none came through its layer; left
    out: they were not asked for."""
    kind: str
    """Kind of the layer, or layers, that use the parameter."""
    algorithm: str = ""
    """Algorithm by which the parameter's per-sample gradient norms were computed; empty if no statistic needed norms."""
    uses: int = 0
    """Uses of the parameter in the last backward; more than one for tied weights and modules called several times."""


class Coverage(Mapping[str, Cover]):
    """{parameter name: Cover} for every parameter of the model; `str()` is a table."""

    def __init__(self, covers: Mapping[str, Cover]) -> None:
        """Copy {parameter name: Cover}."""
        self._covers = dict(covers)

    def __getitem__(self, name: str) -> Cover:
        """The `Cover` of the parameter of this name: whether and how its gradients were captured."""
        return self._covers[name]

    def __iter__(self) -> Iterator[str]:
        """Parameter names in the model's order."""
        return iter(self._covers)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._covers)

    def __str__(self) -> str:
        """A table with one row per parameter: status, kind of layer, algorithm, uses."""
        rows = [(n, c.status, c.kind, c.algorithm, str(c.uses)) for n, c in self._covers.items()]
        return str(PlanTable(("parameter", "status", "layer", "algorithm", "uses"), rows))

    def __repr__(self) -> str:
        """Number of covered, frozen, unused and left-out parameters, as text."""
        states: list[str] = [cover.status for cover in self._covers.values()]
        shown = ("covered", "frozen", "unused", *(["left out"] if "left out" in states else []))
        return f"Coverage({', '.join(f'{states.count(s)} {s}' for s in shown)})"
