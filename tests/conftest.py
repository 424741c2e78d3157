"""What 11 000 collected tests leave behind lives as long as the process: the garbage collector need not look at it."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is garbage while tests are collected; looking for it takes a third of the time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on, a collection goes over what the tests themselves make: microseconds in place of half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
