"""Influence on gloo processes: scores are those of one process, a build goes on with any number, and all end together."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.influence import BuildOptions, Index, PassageCorpus, Query, build_index, index_builder, open_index
from gramian.influence.findings import find
from gramian.parallel.process_grid import ONE_PROCESS, DataParallelKind, ProcessGrid
from tests.curvature.problems import assert_close
from tests.curvature.small import WORDS
from tests.influence.corpora import PASSAGES, corpus
from tests.kit.matrix import FULL
from tests.kit.processes import run_on_ranks

pytestmark = [pytest.mark.oracle, pytest.mark.dist, pytest.mark.xdist_group("processes")]
QUERIES = [Query("1 2", "3 4 5"), Query("", "6 7 0")]
MATRIX = [
    (2, PASSAGES, {"gradients": "1MB"}, False),
    *((size, passages, {"factors": factors, "fisher": fisher, "gradients": "1MB"}, tied)
      for size, passages, factors, fisher, tied in itertools.product(
          (2, 3), (PASSAGES, 1), ("ekfac", "kfac"), ("mc", "true", "empirical"), (False, True))),
    *((size, 2, {"batch": 1, "gradients": "1MB"}, tied) for size in (2, 3) for tied in (False, True)),
    *((size, PASSAGES, {"only": ("fc.*", "norm.*")}, False) for size in (2, 3)),
    *((size, PASSAGES, {"memory_budget": 20_000, "gradients": 3000}, False) for size in (2, 3)),
]  # fmt: skip
"""(processes, passages, options, whether head and table are tied). Batches have 3 passages and shards 2, so that processes
have different numbers of both; of a single passage all but one have nothing, and of two the head is of low rank."""


def grid_of(rank: int, size: int) -> ProcessGrid:
    return ProcessGrid(rank, size, torch.device("cpu"), DataParallelKind.DDP)


def build(found: PassageCorpus, folder: Path, grid: ProcessGrid, progress: Any = None, **options: Any) -> None:
    """With shards of two passages."""
    with patch.object(index_builder, "SHARD", 2):
        build_index(found, folder, BuildOptions(**{"batch": 3, **options}), progress, grid)


def answers(found: PassageCorpus, folder: Path, grid: ProcessGrid) -> dict[str, Tensor]:
    """All that an index says."""
    asked = Index(found, folder, grid).ask(QUERIES)
    exact = asked.scores("passages", self_influence=True)
    parts = asked.parts([1, 2, 5] if len(found) == PASSAGES else [0])
    assert exact.self_N is not None
    stored = {} if asked._index.options.gradients is None else {"stored": asked.scores("gradients").values_QN}
    shown, scores = find(asked, found, 2)
    assert torch.equal(scores.values_QN, stored.get("stored", exact.values_QN))
    order = [one["passage"] for query in shown["queries"] for one in (*query["likelier"], *query["less_likely"])]
    return {
        "exact": exact.values_QN,
        "self": exact.self_N,
        "parts": parts.values_QP,
        "tokens": parts.tokens_QPT,
        "modules": parts.modules_QPM,
        "order": torch.tensor(order, dtype=torch.float64),
        **stored,
    }


def built_and_asked(
    rank: int, size: int, folder: Path, passages: int, options: dict[str, Any], tied: bool
) -> dict[str, Tensor]:
    found = corpus(tied=tied, passages=passages)
    build(found, folder, grid_of(rank, size), **options)
    return answers(found, folder, grid_of(rank, size))


def asked_only(rank: int, size: int, folder: Path, passages: int, tied: bool) -> dict[str, Tensor]:
    return answers(corpus(tied=tied, passages=passages), folder, grid_of(rank, size))


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert_close(got[name], expected, 1e-10, name)


@pytest.mark.parametrize("size, passages, options, tied", MATRIX if FULL else MATRIX[:1])
def test_scores_are_those_of_one_process(
    tmp_path: Path, size: int, passages: int, options: dict[str, Any], tied: bool
) -> None:
    found = corpus(tied=tied, passages=passages)
    build(found, tmp_path / "one", ONE_PROCESS, **options)
    expected = answers(found, tmp_path / "one", ONE_PROCESS)
    for got in run_on_ranks(size, built_and_asked, tmp_path / "many", passages, options, tied):
        assert_same(got, expected)
    for got in run_on_ranks(size, asked_only, tmp_path / "one", passages, tied):
        assert_same(got, expected)
    assert_same(answers(found, tmp_path / "many", ONE_PROCESS), expected)
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("one", "many")]
    assert names[0] == names[1]


def built_by_the_first(rank: int, size: int, folder: Path) -> bool:
    if rank == 0:
        build(corpus(), folder, ONE_PROCESS, gradients="1MB")
        answers(corpus(), folder, ONE_PROCESS)
    return rank == 0


@pytest.mark.full
def test_one_process_of_several_may_build_and_ask_alone(tmp_path: Path) -> None:
    assert run_on_ranks(2, built_by_the_first, tmp_path / "alone") == [True, False]
    build(corpus(), tmp_path / "one", ONE_PROCESS, gradients="1MB")
    assert_same(*(answers(corpus(), tmp_path / name, ONE_PROCESS) for name in ("alone", "one")))


# ---- failures --------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of the process."""


@contextmanager
def failing(module: ModuleType, name: str, rank: int, failed: int, after: int = 0) -> Iterator[None]:
    """Context manager: on process `failed` a function that a module calls raises when it was called `after` times."""
    ordinary, calls = getattr(module, name), itertools.count()

    def called(*arguments: Any, **named: Any) -> Any:
        if rank == failed and next(calls) == after:
            raise Killed("no more")
        return ordinary(*arguments, **named)

    with patch.object(module, name, called):
        yield


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def build_that_fails(rank: int, size: int, folder: Path, name: str, failed: int, after: int) -> str:
    try:
        with failing(index_builder, name, rank, failed, after):
            build(corpus(), folder, grid_of(rank, size), gradients="1MB")
    except (Killed, GramianError) as error:
        return reason(error)
    return "no error"


def build_on(rank: int, size: int, folder: Path) -> list[str]:
    stages: list[str] = []
    build(corpus(), folder, grid_of(rank, size), lambda *at: stages.append(at[0]), gradients="1MB")
    return stages


FAILURES = [
    ("compressed", 2, 1, 1),
    *itertools.product(("counted_parameters", "set_relative_damping", "sketch_of"), (2, 3), (0, 1), (0,)),
    *itertools.product(("compressed",), (2, 3), (0, 1), (0, 1)),
]
"""(function that fails, processes, process on which it does, calls before that)."""


@pytest.mark.full
@pytest.mark.parametrize("name, size, failed, after", FAILURES)
@pytest.mark.parametrize("then", [1, 2, 3])
def test_a_build_that_fails_on_one_process_ends_on_all_and_goes_on_with_any_number(
    tmp_path: Path, name: str, size: int, failed: int, after: int, then: int
) -> None:
    if name == "compressed" and (size, after) == (3, 1):
        failed = 0  # four shards: the second round of three processes has one
    said = run_on_ranks(size, build_that_fails, tmp_path / "many", name, failed, after)
    others = [line for rank, line in enumerate(said) if rank != failed]
    assert said[failed] == "Killed: no more", said
    assert others == [f"GramianError: process {failed}: Killed: no more"] * (size - 1)
    fitted = (tmp_path / "many" / "factors.safetensors").exists()
    assert fitted == (name != "counted_parameters")
    if name == "counted_parameters":
        assert not (tmp_path / "many").exists()
    stages = build_on(0, 1, tmp_path / "many") if then == 1 else run_on_ranks(then, build_on, tmp_path / "many")[0]
    assert ("factors" in stages) == (not fitted)
    build(corpus(), tmp_path / "one", ONE_PROCESS, gradients="1MB")
    expected = answers(corpus(), tmp_path / "one", ONE_PROCESS)
    assert_same(answers(corpus(), tmp_path / "many", ONE_PROCESS), expected)


def fit_that_fails(rank: int, size: int, folder: Path, stage: str) -> str:
    def stop(name: str, done: int, total: int) -> None:
        if rank == 1 and name == stage:
            raise Killed("no more")

    try:
        build(corpus(), folder, grid_of(rank, size), stop, gradients="1MB")
    except (Killed, GramianError) as error:
        return reason(error)
    return "no error"


@pytest.mark.full
@pytest.mark.parametrize("stage", ["factors", "eigenvalues", "gradients"])
def test_a_stage_that_fails_on_one_process_ends_on_all(tmp_path: Path, stage: str) -> None:
    first, second = run_on_ranks(2, fit_that_fails, tmp_path / "many", stage)
    assert second == "Killed: no more" and first.startswith("GramianError: process 1: Killed") and "\n" not in first


def query_that_fails(rank: int, size: int, folder: Path, name: str, failed: int) -> str:
    try:
        with failing(open_index, name, rank, failed):
            answers(corpus(), folder, grid_of(rank, size))
    except (Killed, GramianError) as error:
        return reason(error)
    return "no error"


@pytest.mark.full
@pytest.mark.parametrize("name", ["factors_of", "query_gradient", "passage_losses"])
@pytest.mark.parametrize("failed", [0, 1])
def test_a_query_that_fails_on_one_process_ends_on_all(tmp_path: Path, name: str, failed: int) -> None:
    build(corpus(), tmp_path / "one", ONE_PROCESS)
    said = run_on_ranks(2, query_that_fails, tmp_path / "one", name, failed)
    assert said[failed] == "Killed: no more"
    assert said[1 - failed] == f"GramianError: process {failed}: Killed: no more"


def refused_build(rank: int, size: int, folder: Path, how: str) -> str:
    found = corpus()
    if how == "weights" and rank == 1:
        with torch.no_grad():
            found.model.fc.weight[0, 0] += 1.0
    if how == "infinite":  # on process 1 alone, which has the second of three batches
        found = replace(found, tokens_NT=found.tokens_NT.clamp(max=WORDS - 2))
        found.tokens_NT[3, 0] = WORDS - 1
        with torch.no_grad():
            found.model.table.weight[WORDS - 1] = torch.nan
    if how == "no target":
        found = replace(found, targets_NT=torch.full_like(found.targets_NT, -100))
    if how == "passages" and rank == 1:
        found = replace(found, tokens_NT=found.tokens_NT.flip(0))
    try:
        build(found, folder, grid_of(rank, size), gradients=10 if how == "gradients" else None)
    except GramianError as error:
        return str(error)
    return "no error"


@pytest.mark.full
@pytest.mark.parametrize(
    "how, message",
    [
        ("weights", "corpus: process 1 has other weights than process 0; expected one model and text on all"),
        ("passages", "corpus: process 1 has other passages than process 0; expected one model and text on all"),
        ("infinite", "expected targets to predict, and a model whose loss is finite on them"),
        ("no target", "expected targets to predict, and a model whose loss is finite on them"),
        ("full", "is not empty; expected a new folder, or an index of this model and text"),
        ("gradients", "gradients: 10 for 7 passages; expected at least"),
    ],
)
def test_what_does_not_fit_is_refused_on_all(tmp_path: Path, how: str, message: str) -> None:
    if how == "full":
        (tmp_path / "file").write_text("")
    for said in run_on_ranks(2, refused_build, tmp_path, how):
        assert message in said and "\n" not in said
    begun = how in ("infinite", "no target", "gradients")
    assert begun == (tmp_path / "index.json").exists() and (begun or len(os.listdir(tmp_path)) == (how == "full"))
