"""What a user meets first: the import is light, the public names are there, rooms keep to their places."""

import ast
from pathlib import Path

import pytest

import gramian
from tests.kit.fresh import run_fresh

PACKAGE = Path(gramian.__file__).parent
ROOMS = [
    "plan",
    "linalg",
    "kernels",
    "parallel",
    "taps",
    "statistics",
    "curvature",
    "privacy",
    "distill",
    "models",
    "train",
    "analysis",
]
"""From the bottom up: a room may import only rooms below it."""


@pytest.mark.xdist_group("fresh")
def test_importing_gramian_loads_nothing_heavy():
    heavy = ("torch._dynamo", "transformers", "opacus", "scipy", "rich", "hypothesis", "matplotlib")
    code = f"import sys, gramian; print([m for m in {heavy!r} if m in sys.modules])"
    done = run_fresh(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_public_names_exist():
    for name in gramian.__all__:
        assert hasattr(gramian, name), name


def imported_rooms(path):
    """Rooms of gramian that a file imports, at module level or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("gramian."):
                yield name.split(".")[1]


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).exists()])
def test_a_room_imports_only_rooms_below_it(room):
    below = {"errors", *ROOMS[: ROOMS.index(room) + 1]}
    for path in (PACKAGE / room).rglob("*.py"):
        assert set(imported_rooms(path)) <= below, path


def test_oracles_import_no_other_room():
    """The runs that compare the library with them import everything, and stand apart."""
    for path in (PACKAGE / "verify").glob("*.py"):
        assert set(imported_rooms(path)) <= {"verify"}, path
        assert "gramian.verify.checks" not in path.read_text(encoding="utf-8"), path
