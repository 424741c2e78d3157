"""The layout of the package: rooms in order, no import circle, small folders and files, one owner for every name."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

import gramian

pytestmark = pytest.mark.xdist_group("house")  # one reading of the package for all

PACKAGE = Path(gramian.__file__).parent
ROOMS = (
    "core", "plan", "kernels", "linalg", "parallel", "oracles", "models", "data", "taps", "statistics", "curvature", "optim",
    "privacy", "distill", "integrations", "train", "analysis", "report", "influence", "verify", "cli",
)  # fmt: skip
"""A room imports rooms to its left; `gramian/__init__.py` and `__main__.py` stand after all of them."""
MOST_FILES, MOST_LINES, MOST_PACKAGE_LINES = 16, 400, 85_000
"""The last is lowered with every cut; a capability that needs more lines raises it, with the reason in its commit."""

EACH_LIBRARY = ("CurvatureCallback",)
"""Classes of one name in several files of `integrations`: users import them from the file of their own library."""


@functools.cache
def modules() -> dict[str, Path]:
    """{dotted name: file} of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def read(module: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """(`imported`, public classes at its top level) of a module: it is parsed once."""
    found, tree = set(), ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return frozenset(name for name in found if name.split(".")[0] == "gramian"), tuple(classes)


def imported(module: str) -> frozenset[str]:
    """Modules of the package that a module imports anywhere in its text, inside functions and for type checkers too."""
    return read(module)[0]


def room(module: str) -> str:
    """The room of a module; "" for the package's own `__init__` and `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def circles(edges: dict[str, frozenset[str]]) -> list[list[str]]:
    """Groups of two or more modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in edges.get(module, ()):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            place = stack.index(module)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_rooms_import_only_earlier_rooms() -> None:
    wrong = [
        f"{module} imports {target}"
        for module in modules()
        for target in imported(module)
        if room(module) and (not room(target) or ROOMS.index(room(target)) > ROOMS.index(room(module)))
    ]
    assert sorted(wrong) == []


def test_no_import_circle() -> None:
    assert circles({module: imported(module) for module in modules()}) == []


def test_a_circle_is_found() -> None:
    edges = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"}), "d": frozenset({"a"})}
    assert circles(edges) == [["a", "b", "c"]]


def test_oracles_import_no_other_room() -> None:
    for module in modules():
        if room(module) == "oracles":
            assert {room(target) for target in imported(module)} <= {"oracles"}, module


def test_folders_and_files_are_small() -> None:
    files = defaultdict(list)
    for path in modules().values():
        files[path.parent].append(path.name)
    large = {
        str(folder): len(names) for folder, names in files.items() if len(set(names) - {"__init__.py"}) > MOST_FILES
    }
    lines = {path: len(path.read_text().splitlines()) for path in modules().values()}
    long = {str(path.relative_to(PACKAGE)): count for path, count in lines.items() if count > MOST_LINES}
    assert (large, long) == ({}, {})
    assert sum(lines.values()) <= MOST_PACKAGE_LINES


def test_every_name_has_one_owner() -> None:
    files, classes = defaultdict(list), defaultdict(list)
    for module, path in modules().items():
        if path.stem not in ("__init__", "options"):
            files[path.stem].append(module)
        for name in read(module)[1]:
            classes[name].append(module)
    assert {name: owners for name, owners in files.items() if len(owners) > 1} == {}
    assert {name: owners for name, owners in classes.items() if len(owners) > 1 and name not in EACH_LIBRARY} == {}
