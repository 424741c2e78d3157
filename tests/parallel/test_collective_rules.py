"""Rules that keep processes from waiting for each other, looked for in the source: what other libraries had to learn.

- Collectives stand in one room, where all processes call them in one order; none of them is behind "if rank == 0".
- A DTensor made of this process's shard is told the whole shape: torch would take it for that of even shards.
- Curvature is not built on backward hooks of modules or hooks of parameters, which break graphs and do not fire on the sharded
  parameters of FSDP2.
"""

import ast
import functools
from collections.abc import Iterator
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


@functools.cache
def calls(tree: ast.AST) -> list[tuple[str, str, ast.Call]]:
    """(what it is called on, where that is a name with dots; name; call) of every call of a watched attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WATCHED:
            owner = node.func.value
            on = ast.unparse(owner) if isinstance(owner, ast.Name | ast.Attribute) else ""
            found.append((on, node.func.attr, node))
    return found


@functools.cache
def parsed(file: Path) -> ast.Module | None:
    """A file without a watched name calls none: it is not parsed."""
    text = file.read_text()
    return ast.parse(text) if any(name in text for name in WATCHED) else None


def trees(folder: str = "") -> Iterator[tuple[Path, ast.Module]]:
    for file in FILES:
        place = file.relative_to(SOURCE)
        tree = parsed(file) if str(place).startswith(folder) else None
        if tree is not None:
            yield place, tree


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


def test_collectives_stand_in_one_room() -> None:
    elsewhere = {str(place): found for place, tree in trees() if (found := outside_of_parallel(tree))}
    assert {place for place in elsewhere if not place.startswith("parallel/")} == set()


def test_no_collective_is_for_one_rank_or_takes_pickles() -> None:
    for place, tree in trees():
        assert behind_a_rank(tree) == [], place
        assert not WITH_PICKLE & {name for _, name, _ in calls(tree)}, place


def test_shards_are_told_the_whole_shape() -> None:
    assert {str(place): found for place, tree in trees() if (found := without_shape(tree))} == {}


@pytest.mark.parametrize("room", ["taps", "statistics", "curvature", "parallel"])
def test_captures_do_not_stand_on_backward_hooks(room: str) -> None:
    assert {str(place): found for place, tree in trees(f"{room}/") if (found := on_hooks(tree))} == {}


@pytest.mark.parametrize(
    "rule, source",
    [
        (outside_of_parallel, "dist.all_reduce(x)"),
        (outside_of_parallel, "torch.distributed.barrier()"),
        (without_shape, "DTensor.from_local(x, mesh, [Shard(0)], run_check=False)"),
        (behind_a_rank, "if rank == 0:\n    dist.barrier()"),
        (on_hooks, "module.register_full_backward_hook(f)"),
    ],
)
def test_a_rule_that_is_broken_is_seen(rule: object, source: str) -> None:
    assert callable(rule) and rule(ast.parse(source))
