"""The coverage report of a capture: which parameters it explained, by which kind of layer and algorithm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gramian.plan.plan_table import PlanTable


@dataclass(frozen=True)
class Cover:
    """How one parameter was covered."""

    status: Literal["covered", "frozen", "unused"]
    """"unused": trainable, but no gradient came through its layer."""
    kind: str
    """Kind of the layer, or layers, that used it."""
    algorithm: str = ""
    """How its norm was formed, where a norm was asked for."""
    uses: int = 0
    """Uses per pass; more than one for tied weights and modules called several times."""


class Coverage(Mapping[str, Cover]):
    """{parameter name: Cover} for every parameter of the model; `str()` is a table."""

    def __init__(self, covers: Mapping[str, Cover]) -> None:
        """Copy the mapping."""
        self._covers = dict(covers)

    def __getitem__(self, name: str) -> Cover:
        """How this parameter was covered."""
        return self._covers[name]

    def __iter__(self) -> Iterator[str]:
        """Names in the model's order."""
        return iter(self._covers)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._covers)

    def __str__(self) -> str:
        """One row per parameter."""
        rows = [(n, c.status, c.kind, c.algorithm, str(c.uses)) for n, c in self._covers.items()]
        return str(PlanTable(("parameter", "status", "layer", "algorithm", "uses"), rows))

    def __repr__(self) -> str:
        """Counts by status."""
        states = [cover.status for cover in self._covers.values()]
        return f"Coverage({', '.join(f'{states.count(s)} {s}' for s in ('covered', 'frozen', 'unused'))})"
