"""Thin the rows of a curve to a bounded number without losing its extremes."""

from collections.abc import Mapping, Sequence
from typing import Any

from gramian.report.run_data import number


def thin(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], most: int) -> list[Mapping[str, Any]]:
    """At most `most` of `rows` (at least 2 · number of fields + 2), in order; each field keeps its minimum and maximum.

    Rows with a value of a field are divided into equal parts, and each part keeps the row of its smallest and of its largest
    value, so spikes stay visible. The first and the last row stay. Cost: O(rows · fields).
    """
    if len(rows) <= most:
        return list(rows)
    kept = {0, len(rows) - 1}
    curves = [
        [(place, value) for place, row in enumerate(rows) if (value := number(row.get(field))) is not None]
        for field in fields
    ]
    share = max(2, (most - 2) // max(1, sum(map(bool, curves))))
    for values in curves:
        if len(values) <= share:
            kept.update(place for place, _ in values)
            continue
        parts = share // 2
        for part in range(parts):
            piece = values[part * len(values) // parts : (part + 1) * len(values) // parts]
            kept.add(min(piece, key=lambda pair: pair[1])[0])
            kept.add(max(piece, key=lambda pair: pair[1])[0])
    return [rows[place] for place in sorted(kept)]
