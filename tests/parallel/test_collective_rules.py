"""Rules that keep processes from waiting for each other, looked for in the source: what other libraries had to learn.

- Collectives stand in one room, where all processes call them in one order; none of them is behind "if rank == 0".
- A DTensor made of this process's shard is told the whole shape: torch would take it for that of even shards.
- Curvature is not built on backward hooks of modules or hooks of parameters, which break graphs and do not fire on the sharded
  parameters of FSDP2.
"""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import gramian

SOURCE = Path(gramian.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
}  # fmt: skip
WITH_PICKLE = {name for name in COLLECTIVES if "object" in name}
HOOKS = {"register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"}
WATCHED = {*COLLECTIVES, *HOOKS, "from_local"}


def calls(tree: ast.AST) -> list[tuple[str, str, ast.Call]]:
    """(what it is called on, where that is a name with dots; name; call) of every call of a watched attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WATCHED:
            owner = node.func.value
            on = ast.unparse(owner) if isinstance(owner, ast.Name | ast.Attribute) else ""
            found.append((on, node.func.attr, node))
    return found


def outside_of_parallel(tree: ast.AST) -> list[str]:
    return [name for on, name, _ in calls(tree) if on in ("dist", "torch.distributed") and name in COLLECTIVES]


def without_shape(tree: ast.AST) -> list[str]:
    """Calls of `DTensor.from_local` that leave torch to guess, other than of whole tensors that are to be summed."""
    found = []
    for _, name, call in calls(tree):
        told = {keyword.arg for keyword in call.keywords}
        if name == "from_local" and "Partial()" not in ast.unparse(call) and not {"shape", "stride"} <= told:
            found.append(ast.unparse(call))
    return found


def on_hooks(tree: ast.AST) -> list[str]:
    return [name for _, name, _ in calls(tree) if name in HOOKS]


def behind_a_rank(tree: ast.AST) -> list[str]:
    """Collectives in a branch that one rank takes."""
    found: list[str] = []
    if not any(name in COLLECTIVES for _, name, _ in calls(tree)):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "rank" in ast.unparse(node.test) and "world" not in ast.unparse(node.test):
            for on, name, _ in (call for part in (*node.body, *node.orelse) for call in calls(part)):
                if on in ("dist", "torch.distributed") and name in COLLECTIVES:
                    found.append(f"{ast.unparse(node.test)}: {name}")
    return found


def with_pickle(tree: ast.AST) -> list[str]:
    return [name for _, name, _ in calls(tree) if name in WITH_PICKLE]


@functools.cache
def broken() -> dict[Callable[[ast.AST], list[str]], dict[str, list[str]]]:
    """{rule: {file: what breaks it there}}. Every file is parsed once, and only if a watched name is called in it."""
    found: dict[Callable[[ast.AST], list[str]], dict[str, list[str]]] = {rule: {} for rule in RULES}
    for file in FILES:
        text = file.read_text()
        tree = ast.parse(text) if re.search(rf"\.({'|'.join(WATCHED)})\s*\(", text) else None
        for rule in RULES if tree is not None else ():
            if told := rule(tree):
                found[rule][str(file.relative_to(SOURCE))] = told
    return found


RULES = (outside_of_parallel, behind_a_rank, with_pickle, without_shape, on_hooks)


def test_collectives_stand_in_one_room() -> None:
    assert {place.partition("/")[0] for place in broken()[outside_of_parallel]} == {"parallel"}


@pytest.mark.parametrize("rule", [behind_a_rank, with_pickle])
def test_no_collective_is_for_one_rank_or_takes_pickles(rule: Callable[[ast.AST], list[str]]) -> None:
    assert broken()[rule] == {}


def test_shards_are_told_the_whole_shape() -> None:
    assert broken()[without_shape] == {}


@pytest.mark.parametrize("room", ["taps", "statistics", "curvature", "parallel"])
def test_captures_do_not_stand_on_backward_hooks(room: str) -> None:
    assert {place: told for place, told in broken()[on_hooks].items() if place.startswith(f"{room}/")} == {}


@pytest.mark.parametrize(
    "rule, source",
    [
        (outside_of_parallel, "dist.all_reduce(x)"),
        (outside_of_parallel, "torch.distributed.barrier()"),
        (without_shape, "DTensor.from_local(x, mesh, [Shard(0)], run_check=False)"),
        (behind_a_rank, "if rank == 0:\n    dist.barrier()"),
        (with_pickle, "dist.all_gather_object(found, x)"),
        (on_hooks, "module.register_full_backward_hook(f)"),
    ],
)
def test_a_rule_that_is_broken_is_seen(rule: object, source: str) -> None:
    assert callable(rule) and rule(ast.parse(source))
