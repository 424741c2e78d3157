"""Mutations: deliberate bugs that are put into the package while a test runs, and must turn it red.

A mutation names its place by a seam: "Class.method", or "file:function" for a function of a module. Names of classes and of
files are unique in the package, so a seam stays valid when files move to other folders; an `options.py` is named with its
folder, "privacy/options:function".
"""

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gramian
from tests.kit.matrix import FULL

RED = (AssertionError, gramian.GramianError, RuntimeError, pytest.fail.Exception)
"""What a mutated test may raise."""


@functools.cache
def _owners() -> dict[str, str]:
    """{name of a class, of a file, or folder/file: dotted name of its module} over the whole package."""
    root = Path(gramian.__file__).parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("gramian", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        for name in (*classes, path.stem, f"{path.parent.name}/{path.stem}"):
            found[name] = "" if name in found else module
    return found


def seam(target: str) -> tuple[Any, Any, str]:
    """The module, the owner (module or class) and the attribute's name that "Class.method" or "file:function" stands for."""
    file, _, path = target.rpartition(":")
    *owners, name = path.split(".")
    place = _owners().get(file or owners[0], "")
    assert place, f"{target}: {file or owners[0]} is not the name of one file or class of the package"
    module = importlib.import_module(place)
    return module, functools.reduce(getattr, owners, module), name


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must occur exactly once, by `new` in the source of a seam."""

    target: str
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        module, owner, name = seam(self.target)
        found = inspect.getattr_static(owner, name)
        function = found.fget if isinstance(found, property) else found
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.target} holds {source.count(self.old)} times: {self.old}"
        changed = _compiled(source.replace(self.old, self.new), name, module, owner)
        with _put(owner, name, found, property(changed) if isinstance(found, property) else changed):
            yield


@dataclass(frozen=True)
class Swap:
    """Put `value` in the place of a seam."""

    target: str
    value: Any

    @contextmanager
    def applied(self) -> Iterator[None]:
        _, owner, name = seam(self.target)
        with _put(owner, name, inspect.getattr_static(owner, name, None), self.value):
            yield


def _compiled(source: str, name: str, module: Any, owner: Any) -> Any:
    """The function that this source defines, in its module; `super()` works because the class is in scope."""
    lines = [line for line in source.splitlines() if line.strip() != "@property"]
    text = "def make(__class__):\n" + textwrap.indent("\n".join(lines), "    ") + f"\n    return {name}\n"
    scope: dict[str, Any] = {}
    exec(compile(text, f"<mutant of {name}>", "exec"), module.__dict__, scope)
    return scope["make"](owner)


@contextmanager
def _put(owner: Any, name: str, old: Any, new: Any) -> Iterator[None]:
    """Set an attribute, and for a function of a module every name under which other modules of the package imported it."""
    places = [owner]
    if inspect.ismodule(owner):
        modules = [module for key, module in sys.modules.items() if key.startswith("gramian")]
        places = [module for module in modules if getattr(module, name, None) is old]
    own = [name in vars(place) for place in places]
    for place in places:
        setattr(place, name, new)
    try:
        yield
    finally:
        for place, had in zip(places, own, strict=True):
            setattr(place, name, old) if had else delattr(place, name)


@dataclass(frozen=True)
class Mutation:
    """One deliberate bug.

    Attributes:
        name: what the bug is called, here and in the document.
        changes: the edit that makes it, or several.
        check: the test that turns red, with its arguments; a check of this file where that test starts processes itself.
        red: the test of the suite, as pytest names its function.
        on_ranks: the check takes a rank and runs on two processes.
        refused: of bugs that the row proof must find: how its error begins, which names the layer or the parameter.
    """

    name: str
    changes: Edit | Swap | tuple[Edit | Swap, ...]
    check: Callable[..., Any]
    red: str = ""
    on_ranks: bool = False
    refused: str = ""
    applied: Callable[[], Any] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.changes, tuple):
            object.__setattr__(self, "changes", (self.changes,))
        object.__setattr__(self, "applied", functools.partial(_applied, self.changes))

    @property
    def test(self) -> str:
        """The test of the suite that turns red: file and function."""
        if self.red:
            return self.red
        function = self.check.func if isinstance(self.check, functools.partial) else self.check
        return f"{function.__module__.replace('.', '/')}.py::{function.__name__}"


@contextmanager
def _applied(changes: tuple[Edit | Swap, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change.applied())
        yield


def turns_red(mutation: Mutation, seen: Any, match: str | None = None) -> None:
    """The check fails with the bug. Without it, before and after, it is green: in ``make test`` the test itself shows that."""
    if FULL:
        mutation.check()
    with mutation.applied(), pytest.raises(seen, match=match):
        mutation.check()
    if FULL:
        mutation.check()


def package_identity() -> dict[str, dict[str, int]]:
    """The identity of everything in the package's modules and classes."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("gramian")}
    classes = {
        f"{name}:{key}": value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__.startswith("gramian")
    }
    return {name: {k: id(v) for k, v in vars(place).items()} for name, place in {**modules, **classes}.items()}
