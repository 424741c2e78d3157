"""The matrix of models: what it says holds, nothing in it is wrong, and the page in the documentation is this matrix."""

import json
from typing import Any

import pytest
import transformers

from tests.kit.matrix import FULL, sample
from tests.zoo import models_page
from tests.zoo.__main__ import MATRIX, in_turns, merge
from tests.zoo.columns import COLUMNS, Study
from tests.zoo.zoo_models import example, in_double, names

ROWS: dict[str, dict[str, Any]] = json.loads(MATRIX.read_text())["rows"]
CELLS = [
    (column, name, outcome)
    for name, row in ROWS.items()
    for column, (outcome, _) in row.get("cells", {}).items()
    if column in COLUMNS and outcome != "late"
]
LARGEST = {"norms": 20_000, "private sum": 20_000, "inductor": 0}
QUICK = [
    one
    for one in CELLS
    if ROWS[one[1]]["parameters"] < LARGEST.get(one[0], 2_000)
    and not ROWS[one[1]].get("inputs", "").startswith("text+")
]
"""Of which `make test` takes its sample: compiling a layer takes a second, a model ten; Inductor ten times as long; the proof
of logits between samples, as of texts and images, a minute."""


@pytest.mark.full  # it imports all of transformers
def test_every_type_of_the_installed_transformers_has_a_row() -> None:
    assert json.loads(MATRIX.read_text())["transformers"] == transformers.__version__
    assert set(ROWS) == set(names())


def test_nothing_is_wrong_and_nothing_crashes() -> None:
    assert [(name, column) for column, name, outcome in CELLS if outcome in ("wrong", "crash")] == []


def test_the_page_is_the_matrix() -> None:
    assert models_page.PAGE.read_text() == models_page.text(json.loads(MATRIX.read_text()))


def test_a_merge_replaces_the_cells_of_the_columns_that_ran_and_a_row_that_now_runs() -> None:
    rows: dict[str, Any] = {"a": {"cells": {"norms": ["late", ""], "bf16": ["exact", ""]}}, "b": {"cannot": "x"}}
    merge(rows, {"a": {"size": 1, "cells": {"norms": ["exact", ""]}}, "b": {"cells": {"norms": ["exact", ""]}}})
    assert rows["a"] == {"size": 1, "cells": {"norms": ["exact", ""], "bf16": ["exact", ""]}}
    assert rows["b"] == {"cells": {"norms": ["exact", ""]}}


def test_the_first_rows_of_a_run_are_of_every_kind() -> None:
    rows = ["bert", "albert", "gpt2", "llama", "nn.Linear", "nn.LSTM", "net.ViT"]
    assert set(in_turns(rows)[:5]) == {"bert", "gpt2", "llama", "nn.Linear", "net.ViT"}


@pytest.mark.parametrize(("column", "name", "outcome"), CELLS if FULL else sample(QUICK, 4))
def test_a_cell_of_the_matrix(column: str, name: str, outcome: str) -> None:
    row = ROWS[name]
    with in_double():
        assert Study(example(name, row["size"], row["inputs"])).cell(column).outcome == outcome
