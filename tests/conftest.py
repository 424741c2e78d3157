"""Which tests run, with which seeds; and what 11 000 collected tests leave behind is kept from the garbage collector."""

import functools
import gc
from collections.abc import Generator, Iterator

import pytest
import torch

from tests.kit import proofs, seeds
from tests.kit.matrix import FULL, thinned
from tests.kit.whole_roots import never_the_root


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is garbage while tests are collected; looking for it takes a third of the time."""
    gc.disable()
    config.pluginmanager.register(seeds)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a matrix of tests, a part in which every value of every axis occurs; all of it with GRAMIAN_FULL=1.

    Tests marked gpu are skipped where there is none. In the short run tests of a file share a worker of xdist, and with it what
    the file builds once, unless they name another group.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if FULL or not item.get_closest_marker("full"):  # which no cell that stays may count on for its values
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for matrix in () if FULL else matrices.values():
        cells = [item.callspec.params if hasattr(item, "callspec") else {} for item in matrix]
        chosen = set(thinned(cells, processes=matrix[0].get_closest_marker("dist") is not None))
        left_out += [item for i, item in enumerate(matrix) if i not in chosen]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    for matrix in matrices.values():
        proofs.choose([item for item in matrix if item not in gone])
    for item in () if FULL else items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with proofs.as_chosen(item):
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on, a collection goes over what the tests themselves make: microseconds in place of half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many random programs were exact and how many refused (tests/taps/test_programs.py)."""
    reports = [r for found in terminalreporter.stats.values() for r in found if getattr(r, "when", "") == "call"]
    tallies = [value for report in reports for name, value in report.user_properties if name == "programs"]
    if tallies:
        from tests.kit.programs import merged, table  # not before torch is needed

        found = functools.reduce(merged, tallies)
        terminalreporter.section("random programs")
        terminalreporter.write_line(table(found if FULL else {"all": found["all"]}))


@pytest.fixture
def root_not_taken() -> Iterator[None]:
    """No model is tapped as one layer itself, which would be exact whatever the taps of its layers count."""
    with never_the_root():
        yield
