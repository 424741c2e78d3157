"""Factors stored elsewhere or otherwise, and the bytes they hold."""

from collections.abc import Callable

import pytest
import torch

from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from tests.linalg.matrices import distance, normal, positive, probabilities, stored_matrix

N, R = 10, 3


def _softmax(dtype: torch.dtype) -> Factor:
    p, w = probabilities(N, R)
    return DiagonalLowRank.softmax(p * w.sqrt(), dtype)


KINDS: dict[str, Callable[[torch.dtype], Factor]] = {
    "dense": lambda dtype: Dense.of(positive(N), dtype),
    "low rank": lambda dtype: LowRank.of(normal(N, R), dtype),
    "diagonal": lambda dtype: Diagonal(normal(N).abs().to(dtype)),
    "plus": lambda dtype: DiagonalLowRank.of(normal(N).abs(), normal(N, R), +1, dtype),
    "softmax": _softmax,
}
ROUNDING = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_another_dtype_costs_its_rounding_and_comes_back(kind: str, dtype: torch.dtype) -> None:
    factor = KINDS[kind](torch.float64)
    moved = factor.to(dtype=dtype)
    want = dtype if kind != "diagonal" else torch.promote_types(dtype, torch.float32)
    assert type(moved) is type(factor)
    assert moved.storage_dtype == want
    assert moved.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert distance(stored_matrix(moved), stored_matrix(factor)) <= ROUNDING[want]
    back = moved.to(dtype=torch.float64)
    assert back.dtype == torch.float64
    assert distance(stored_matrix(back), stored_matrix(moved)) <= 1e-14
    y = normal(N, 2, seed=1)
    assert distance(back.solve(y, 0.5), factor.solve(y, 0.5)) <= 30 * ROUNDING[want]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_same_place_is_the_same_matrix(kind: str, dtype: torch.dtype) -> None:
    factor = KINDS[kind](dtype) if kind != "diagonal" else KINDS[kind](torch.float64)
    for moved in (factor.to("cpu"), factor.to(), factor.to(dtype=factor.storage_dtype)):
        assert torch.equal(stored_matrix(moved), stored_matrix(factor))
        assert torch.equal(moved.quantisation_error, factor.quantisation_error)
        assert moved.storage_dtype == factor.storage_dtype
        assert moved.kind == factor.kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_moves_to_another_device(kind: str) -> None:
    factor = KINDS[kind](torch.float64)
    moved = factor.to("meta")
    assert moved.device.type == "meta"
    assert moved.quantisation_error.device.type == "meta"
    assert moved.diagonal().device.type == "meta"
    assert factor.device.type == "cpu"


def test_bytes_are_those_of_what_is_held() -> None:
    for dtype in ROUNDING:
        size, half = dtype.itemsize, dtype.itemsize == 2
        assert KINDS["dense"](dtype).nbytes == size * N * N + (2 * 4 * N if half else 0)
        assert KINDS["low rank"](dtype).nbytes == size * N * R + (4 * R if half else 0)
        for kind in ("plus", "softmax"):
            assert KINDS[kind](dtype).nbytes == size * N * R + (4 * R if half else 0) + 8 * N
    assert KINDS["diagonal"](torch.float32).nbytes == 4 * N


def test_bytes_grow_by_what_was_decomposed() -> None:
    y = normal(N, 1)
    dense, low, plus = (KINDS[kind](torch.float64) for kind in ("dense", "low rank", "plus"))
    rest = [factor.nbytes for factor in (dense, low, plus)]
    dense.power(y, -0.5, 0.1)
    assert dense.nbytes == rest[0] + 8 * (N * N + N)
    dense.solve(y, 0.1)
    assert dense.nbytes == rest[0] + 8 * (N * N + N) + 8 * N * N
    dense.solve(y, 0.2)  # one damping is kept
    assert dense.nbytes == rest[0] + 8 * (N * N + N) + 8 * N * N
    low.solve(y, 0.1)
    assert low.nbytes == rest[1] + 8 * R * R
    low.power(y, -0.5, 0.1)
    assert low.nbytes == rest[1] + 8 * R * R + 8 * (R * R + R)
    plus.solve(y, 0.1)
    assert plus.nbytes == rest[2] + 8 * R * R
    plus.power(y, -0.5, 0.1, 1.5)  # the clip needs the matrix written out, and the kept Gram for the bound
    assert plus.nbytes == rest[2] + 2 * 8 * R * R + 8 * N * N + 8 * (N * N + N)
