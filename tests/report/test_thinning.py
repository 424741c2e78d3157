"""Thinning keeps extremes, ends and order, and never exceeds its bound."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.report.thinning import thin

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(st.tuples(VALUES, VALUES), max_size=300), st.integers(6, 60))
@settings(max_examples=50)
def test_a_thinned_curve_has_its_extremes_and_ends(values: list[tuple[Any, Any]], most: int) -> None:
    rows = [{"step": i, "a": a, "b": b} for i, (a, b) in enumerate(values)]
    kept = thin(rows, ["a", "b"], most)
    assert len(kept) <= most
    assert [row["step"] for row in kept] == sorted({row["step"] for row in kept})
    if rows:
        assert kept[0] == rows[0] and kept[-1] == rows[-1]
    for name in ("a", "b"):
        before = [row[name] for row in rows if row[name] is not None]
        after = [row[name] for row in kept if row[name] is not None]
        assert (min(before, default=0), max(before, default=0)) == (min(after, default=0), max(after, default=0))
