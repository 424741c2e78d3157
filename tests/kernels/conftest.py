"""One worker has the process that interprets kernels, whose start takes longer than most of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/kernels/") and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("kernels"))
