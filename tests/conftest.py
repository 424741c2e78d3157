"""What 11 000 collected tests leave behind lives as long as the process: the garbage collector need not look at it."""

import gc

import pytest

from tests.kit.matrix import FULL, thinned


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is garbage while tests are collected; looking for it takes a third of the time."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a matrix of tests, a part in which every value of every axis occurs; all of it with GRAMIAN_FULL=1."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for matrix in () if FULL else matrices.values():
        chosen = set(thinned([item.callspec.params if hasattr(item, "callspec") else {} for item in matrix]))
        left_out += [item for i, item in enumerate(matrix) if i not in chosen]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on, a collection goes over what the tests themselves make: microseconds in place of half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
