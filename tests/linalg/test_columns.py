"""Thin products block by block, and heads as wide as a vocabulary."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramian
from gramian.linalg import DiagonalLowRank, Factor, LowRank
from gramian.linalg import wide as wide_module
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.compression import compress
from gramian.linalg.factors.merging import merge
from gramian.linalg.factors.stored import store_columns
from tests.linalg.matrices import distance, normal, probabilities

VOCABULARY, TOKENS = 50_257, 64


class _Largest(TorchDispatchMode):
    """The entries of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.fixture(scope="module")
def columns_vt() -> Tensor:
    return torch.randn(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0)).softmax(0)


@pytest.fixture(params=["low rank", "plus", "softmax"])
def head(request: pytest.FixtureRequest, columns_vt: Tensor) -> Iterator[tuple[Factor, int]]:
    """A head in float16, and the entries of U."""
    if request.param == "low rank":
        factor: Factor = LowRank.of(columns_vt, torch.float16)
    elif request.param == "plus":
        factor = DiagonalLowRank.of(columns_vt.mean(1), columns_vt, +1, torch.float16)
    else:
        factor = DiagonalLowRank.softmax(columns_vt, torch.float16)
    yield factor, columns_vt.numel()


def test_a_head_as_wide_as_a_vocabulary_is_never_written_out(head: tuple[Factor, int]) -> None:
    factor, entries = head
    assert factor.nbytes <= 2 * entries + 8 * (VOCABULARY + TOKENS)
    y = torch.randn(VOCABULARY, 2, generator=torch.Generator().manual_seed(1))
    damping = 1e-6
    with _Largest() as seen:
        answers = [factor.matvec(y), factor.solve(y, damping), factor.power(y, -1.0, damping)]
        answers += [factor.power(y, 1.0, damping, 1e3), factor.diagonal()]
        numbers = [factor.logdet(damping), factor.trace(), factor.frobenius()]
        factor.clip(damping, 1e3)
        compress(factor, rank=4)
        merge(factor, factor, 0.9, 0.1)
        factor.to(dtype=torch.bfloat16)
    assert seen.entries <= 2 * entries
    assert all(bool(t.isfinite().all()) for t in [*answers, *numbers])
    assert factor.nbytes <= 2 * entries + 8 * (VOCABULARY + TOKENS) + 3 * 8 * TOKENS**2
    assert distance(factor.power(answers[1], 1.0, damping), y) <= 1e-5


def test_a_head_as_wide_as_a_vocabulary_is_refused_as_a_matrix(head: tuple[Factor, int]) -> None:
    factor, _ = head
    with pytest.raises(gramian.GramianError, match="^to_dense: the side is 50257 wide; expected at most 16384$"):
        factor.to_dense()


def test_a_fractional_power_of_a_wide_softmax_head_squares_to_the_whole_one(columns_vt: Tensor) -> None:
    factor = DiagonalLowRank.softmax(columns_vt[:, :8], torch.float16)
    y = torch.randn(VOCABULARY, 1, generator=torch.Generator().manual_seed(1))
    root = factor.power(y, -0.5, 1e-6)
    assert factor.work.error_bound < 1e-6
    assert distance(factor.power(root, -0.5, 1e-6), factor.power(y, -1.0, 1e-6)) <= 1e-5


@pytest.mark.parametrize("storage", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 7, 30, 10**9])
def test_products_in_blocks_are_the_products(storage: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    u, y, weights = normal(23, 4), normal(23, 3, seed=1), normal(23, seed=2).abs()
    stored = store_columns(u, storage)
    wide = stored.load(dtype=torch.float64)
    monkeypatch.setattr(wide_module, "BLOCK", block)
    blocked = Columns(stored)
    assert len([*blocked.blocks()]) == (23 if block < 8 else 4 if block == 30 else 1)
    assert distance(blocked.transposed_times(y), wide.mT @ y) <= 1e-14
    assert distance(blocked.times(normal(4, 3)), wide @ normal(4, 3)) <= 1e-14
    assert distance(blocked.gram(), wide.mT @ wide) <= 1e-14
    assert distance(blocked.gram(weights), wide.mT @ (weights[:, None] * wide)) <= 1e-14
    assert distance(blocked.squares_N(), wide.square().sum(1)) <= 1e-14


@pytest.mark.parametrize("block", [1, 30])
def test_factors_in_blocks_are_the_factors(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p, w = probabilities(23, 4)
    y = normal(23, 3, seed=1)

    def answers() -> list[Tensor]:
        found = []
        for factor in (LowRank.of(p), DiagonalLowRank.softmax(p * w.sqrt(), torch.float64)):
            found += [factor.matvec(y), factor.solve(y, 0.1), factor.power(y, -0.5, 0.1), factor.logdet(0.1)]
            found += [factor.diagonal(), factor.trace(), compress(factor, rank=2).factor.to_dense()]
        return found

    expected = answers()
    monkeypatch.setattr(wide_module, "BLOCK", block)
    for actual, want in zip(answers(), expected, strict=True):
        assert distance(actual, want) <= 1e-11


def test_a_gram_belongs_to_the_caller_and_is_kept_until_it_is_forgotten() -> None:
    kept = Columns(store_columns(normal(23, 4), torch.float16))
    gram = kept.gram()
    gram += 1
    assert torch.equal(kept.gram(), kept.gram())
    assert distance(kept.gram(), gram - 1) <= 1e-15
    assert kept.nbytes == kept.stored.nbytes + 8 * 4**2
    kept.forget()
    assert kept.nbytes == kept.stored.nbytes
