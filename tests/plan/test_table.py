"""The table of every planner: columns are aligned, rows with named fields and lines of text mix, notes follow."""

from dataclasses import dataclass

import pytest

from gramian.plan.budget import Budget, largest_fitting, smallest_fitting
from gramian.plan.plan_table import PlanTable


@dataclass(frozen=True)
class Part:
    name: str
    size: int

    def cells(self) -> tuple[str, ...]:
        return self.name, f"{self.size:,}"


def test_columns_are_as_wide_as_their_longest_cell_and_lines_have_no_trailing_spaces() -> None:
    table = PlanTable(("layer", "bytes", ""), [(*Part("a", 7).cells(), "x"), ("all layers", "7", "")], ["budget none"])
    assert str(table).splitlines() == ["layer       bytes", "a           7      x", "all layers  7", "budget none"]


def test_a_row_shows_itself_by_its_cells() -> None:
    assert str(PlanTable(("layer", "bytes"), [Part("a", 7_000)])) == "layer  bytes\na      7,000"


def test_a_budget_without_a_limit_fits_everything() -> None:
    assert Budget().fits(10**18) and str(Budget()) == "none"
    assert Budget(5).fits(5) and not Budget(5).fits(6)
    assert Budget.of_memory(100).limit == 90 and Budget.of_memory(None).limit is None


@pytest.mark.parametrize("bound", range(-2, 8))
def test_the_search_finds_the_bound_or_nothing(bound: int) -> None:
    fitting = [n for n in range(6) if n >= bound]
    assert smallest_fitting(0, 5, lambda n: n >= bound) == (min(fitting) if fitting else None)
    fitting = [n for n in range(6) if n <= bound]
    assert largest_fitting(0, 5, lambda n: n <= bound) == (max(fitting) if fitting else None)
    assert smallest_fitting(3, 2, lambda n: True) is None
