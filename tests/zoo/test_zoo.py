"""The matrix of models: what it says holds, nothing in it is wrong, and the page in the documentation is this matrix."""

import json
from typing import Any

import pytest
import transformers

from tests.kit.matrix import FULL, sample
from tests.zoo import models_page
from tests.zoo.__main__ import MATRIX
from tests.zoo.columns import COLUMNS, cell
from tests.zoo.tiny_configs import model_types
from tests.zoo.zoo_models import example, in_double

ROWS: dict[str, dict[str, Any]] = json.loads(MATRIX.read_text())["rows"]
CELLS = [
    (column, name, outcome)
    for name, row in ROWS.items()
    for column, (outcome, _) in row.get("cells", {}).items()
    if column in COLUMNS and outcome != "late"
]
QUICK = [one for one in CELLS if ROWS[one[1]]["parameters"] < 20_000]
"""Of which `make test` takes its sample."""


@pytest.mark.full  # it imports all of transformers
def test_every_type_of_the_installed_transformers_has_a_row() -> None:
    assert json.loads(MATRIX.read_text())["transformers"] == transformers.__version__
    assert set(ROWS) == set(model_types())


def test_nothing_is_wrong_and_nothing_crashes() -> None:
    assert [(name, column) for column, name, outcome in CELLS if outcome in ("wrong", "crash")] == []


def test_the_page_is_the_matrix() -> None:
    assert models_page.PAGE.read_text() == models_page.text(json.loads(MATRIX.read_text()))


@pytest.mark.parametrize(("column", "name", "outcome"), CELLS if FULL else sample(QUICK, 4))
def test_a_cell_of_the_matrix(column: str, name: str, outcome: str) -> None:
    row = ROWS[name]
    with in_double():
        assert cell(column, example(name, row["size"], row["inputs"])).outcome == outcome
