"""A sample of a matrix has every value of every axis."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.matrix import FEW, SHARE, thinned


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_every_value_of_every_axis_is_left(lengths: list[int]) -> None:
    cells = [
        {f"axis {k}": [value] if k % 2 else value for k, value in enumerate(values)}
        for values in itertools.product(*(map(str, range(n)) for n in lengths))
    ]
    chosen = thinned(cells)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(len(cells)))
    assert len(chosen) >= min(len(cells), max(FEW, round(SHARE * len(cells))))
    for axis in cells[0]:
        assert {str(cells[i][axis]) for i in chosen} == {str(cell[axis]) for cell in cells}


def test_a_large_matrix_is_thinned_and_a_list_is_not() -> None:
    cells = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(6), range(5), range(4))]
    assert len(thinned(cells)) == round(SHARE * len(cells)) == 12
    assert len(thinned(cells[:20])) == 5  # as many as the longest axis has values
    assert thinned([{"refused": value} for value in range(50)]) == list(range(50))
    assert len(thinned([{"a": a} for a in (1, True, 1.0) * 4])) == 3


def test_of_a_matrix_on_several_processes_few_cells_are_left() -> None:
    cells = [{"a": a} for a in range(50)]
    chosen = thinned(cells, processes=True)
    assert len(set(chosen)) == FEW and chosen == sorted(chosen)
    assert thinned(cells[:FEW], processes=True) == list(range(FEW))
