"""Beside what is stored only a bounded piece exists in wide precision, however wide or long the matrix is.

Peaks are measured at the allocator. The piece is made small, so that a second whole copy could not hide in it.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gramian.curvature.estimate.token_moments import Tokens, WeightedColumns
from gramian.linalg import Dense, DiagonalLowRank, Factor, LowRank
from gramian.linalg import wide as wide_module
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import Stored, store_columns, store_symmetric
from gramian.linalg.wide import piece_entries, pieces, wide_moments
from tests.kit.memory import measured
from tests.linalg.matrices import distance, normal, positive, probabilities

N, R = 900, 400
PIECE = 4000
ROOM = 3 * 8 * PIECE + 40_000
"""Bytes of three pieces in float64, and of what has n or r entries."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SOME = [torch.float16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in DTYPES[1:3]), torch.float64]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_module, "BLOCK", PIECE)


def stored(dtype: torch.dtype, seed: int = 0) -> Stored:
    return store_columns(normal(N, R, seed=seed), dtype)


@pytest.mark.parametrize("count, each", [(0, 5), (7, 1), (7, 3999), (7, 4000), (7, 4001), (9, 1000), (10_000, 3)])
def test_pieces_cover_everything_once_and_none_is_larger_than_told(count: int, each: int, small_pieces: None) -> None:
    found = list(pieces(count, each))
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(count))
    sizes = [(piece.stop - piece.start) * each for piece in found]
    assert max(sizes, default=0) == piece_entries(count, each) <= max(PIECE, each)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("kept", SOME)
def test_storing_holds_the_body_and_a_piece(
    given: torch.dtype, kept: torch.dtype, layout: str, small_pieces: None
) -> None:
    matrix = normal(N, R).to(given) if layout == "columns" else normal(R, N).to(given).mT
    with measured() as found:
        result = store_columns(matrix, kept)
    body = 0 if result.body.data_ptr() == matrix.data_ptr() else result.body.nbytes
    assert body <= found.peak <= body + ROOM
    assert distance(result.load(dtype=torch.float64), matrix) <= {2: 8e-3, 4: 1e-7, 8: 0.0}[kept.itemsize]


@pytest.mark.parametrize("kept", DTYPES[:3])
def test_storing_a_matrix_holds_the_body_and_a_piece(kept: torch.dtype, small_pieces: None) -> None:
    matrix = normal(N, N)
    matrix = matrix @ matrix.mT
    with measured() as found:
        result = store_symmetric(matrix, kept)
    assert found.peak <= result.body.nbytes + ROOM


@pytest.mark.parametrize("block", [1, 37, 900, 10_000, 10**9])
@pytest.mark.parametrize("kept", SOME)
def test_pieces_change_nothing(kept: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    u, m = normal(31, 13) * torch.logspace(-6, 3, 13, dtype=torch.float64), normal(17, 17)
    m = m @ m.mT
    expected = store_columns(u, kept), store_symmetric(m, kept)
    monkeypatch.setattr(wide_module, "BLOCK", block)
    for got, want in zip((store_columns(u, kept), store_symmetric(m, kept)), expected, strict=True):
        assert torch.equal(got.load(dtype=torch.float64), want.load(dtype=torch.float64))
        assert float(got.relative_error) == pytest.approx(float(want.relative_error), rel=1e-12, abs=1e-30)


USES: dict[str, tuple[Callable[[Columns], object], int]] = {
    "transposed_times": (lambda u: u.transposed_times(torch.ones(N, 2)), 0),
    "times": (lambda u: u.times(torch.ones(R, 2)), 0),
    "gram": (lambda u: u.gram(), 2 * 8 * R * R),  # the caller's and the one kept
    "bound": (lambda u: LowRank(u).largest_bound(), 8 * R * R),
    "weighted gram": (lambda u: u.gram(torch.ones(N, dtype=torch.float64)), 8 * R * R),
    "squares": (lambda u: u.squares_N(), 0),
    "written out": (lambda u: u.squared(), 4 * N * N),
    "to float16": (lambda u: u.to(dtype=torch.float16), 2 * N * R),
    "to bfloat16": (lambda u: u.to(dtype=torch.bfloat16), 2 * N * R),
    "mixed": (lambda u: u.mixed(torch.ones(R, 50)), 4 * N * 50),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_holds_its_result_and_a_piece(use: str, small_pieces: None) -> None:
    columns = Columns(store_columns(normal(N, R), torch.float32))
    act, result = USES[use]
    with measured() as found:
        act(columns)
    assert found.peak <= result + ROOM


@pytest.mark.parametrize("kinds", [(torch.float16, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_a_merge_holds_its_result_and_what_is_rounded_again(
    kinds: tuple[torch.dtype, torch.dtype], small_pieces: None
) -> None:
    mine, theirs = Columns(stored(kinds[0])), Columns(stored(kinds[1], seed=1))
    again = 2 * N * R if kinds[0] != kinds[1] else 0
    with measured() as found:
        mine.join(theirs)
    assert found.peak <= 2 * 2 * N * R + again + ROOM


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_tokens_become_a_factor_without_being_put_together(
    chunks: int, weighted: bool, bias: bool, small_pieces: None
) -> None:
    tokens = [
        Tokens(normal(R // chunks, N, seed=i).float(), normal(R // chunks, seed=9).abs() if weighted else None, None)
        for i in range(chunks)
    ]
    with measured() as found:
        factor = LowRank.of(WeightedColumns(tokens, bias), torch.float16)
    assert found.peak <= factor.nbytes + ROOM
    rows = torch.cat([part.rows_TN for part in tokens]).double()
    roots = torch.cat([normal(R // chunks, seed=9).abs().sqrt()] * chunks) if weighted else rows.new_ones(len(rows))
    want = torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if bias else rows
    assert distance(factor.columns.stored.load(dtype=torch.float64), (want * roots[:, None]).mT) <= 1e-3


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.5), (0.5, torch.tensor(3.0))], ids=str)
def test_columns_of_tokens_are_their_weighted_rows(scales: tuple[float | Tensor, ...]) -> None:
    tokens = [Tokens(normal(4 + i, 6, seed=i), normal(4 + i, seed=7).abs(), None, scales[i]) for i in range(2)]
    columns = WeightedColumns(tokens, bias=False)
    rows = torch.cat([t.rows_TN * t.weights_T.sqrt()[:, None] * float(t.scale) for t in tokens])
    for part in (slice(0, 9), slice(2, 6), slice(4, 5), slice(8, 9)):
        assert distance(columns.factor * columns.piece(part), rows[part].mT) <= 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_products_of_many_tokens_widen_a_piece_of_them(weighted: bool, dtype: torch.dtype, small_pieces: None) -> None:
    rows, weights = normal(5000, 30).to(dtype), normal(5000, seed=1).abs() if weighted else None
    with measured() as found:
        product, first = wide_moments(rows, weights)
    assert found.peak <= 3 * 8 * PIECE + 8 * 30 * 30 * 3
    w = torch.ones(5000, dtype=torch.float64) if weights is None else weights
    assert distance(product, rows.double().mT @ (w[:, None] * rows.double())) <= 1e-5
    assert distance(first, w @ rows.double()) <= 1e-5


def test_a_softmax_head_is_made_of_its_columns_a_piece_at_a_time(small_pieces: None) -> None:
    p, w = probabilities(N, R)
    p = (p * w.sqrt()).float()
    with measured() as found:
        factor = DiagonalLowRank.softmax(p, torch.float16, 0.1)
    assert found.peak <= factor.nbytes + ROOM
    half = DiagonalLowRank.softmax(0.1 * p.double(), torch.float64)
    assert distance(factor.values_N, half.values_N) <= 1e-3


SOLVED: dict[str, Callable[[], Factor]] = {
    "dense": lambda: Dense.of(positive(60), torch.float16),
    "low rank": lambda: LowRank.of(normal(60, 7), torch.float16),
    "softmax": lambda: DiagonalLowRank.softmax(probabilities(60, 7)[0], torch.float16),
}


@pytest.mark.parametrize("kind", SOLVED)
def test_a_solve_of_many_columns_holds_its_result_and_a_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    y, factor = normal(60, 4000, seed=1).float(), SOLVED[kind]()
    whole = factor.solve(y, 1e-7)  # a damping that wants float64
    monkeypatch.setattr(wide_module, "BLOCK", PIECE)
    with measured() as found:
        pieced = factor.solve(y, 1e-7)
    assert distance(pieced, whole) <= 1e-6
    assert found.peak <= y.nbytes + 6 * 8 * PIECE + 3 * 8 * 60 * 60
