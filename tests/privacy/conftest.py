"""No private model outlives its test."""

from collections.abc import Iterator

import pytest

from tests.privacy.problems import ATTACHED


@pytest.fixture(autouse=True)
def engines_are_detached() -> Iterator[None]:
    """Detach the engines of a test that it left attached."""
    yield
    while ATTACHED:
        engine = ATTACHED.pop()
        if engine._installed is not None:
            engine.detach()
