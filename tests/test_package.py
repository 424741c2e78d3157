"""The first contact with the package: the import is light and the public names are there."""

import pytest

import gramian
from tests.kit.fresh import run_fresh


@pytest.mark.xdist_group("fresh")
def test_importing_gramian_loads_nothing_heavy():
    heavy = ("torch._dynamo", "transformers", "opacus", "scipy", "rich", "hypothesis", "matplotlib")
    code = f"import sys, gramian; print([m for m in {heavy!r} if m in sys.modules])"
    done = run_fresh(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_public_names_exist():
    for name in gramian.__all__:
        assert hasattr(gramian, name), name
