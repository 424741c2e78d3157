"""The kernels on a GPU: float64's answers at odd and at large shapes, the same bits twice, what is not written."""

import pytest
import torch

from gramian.kernels.checksums import checksums
from gramian.kernels.norms.direct_squares import _HALF as DIRECT_TILES
from gramian.kernels.norms.direct_squares import direct_squares, direct_squares_kernel
from gramian.kernels.norms.gram_squares import _HALF as GRAM_TILES
from gramian.kernels.norms.gram_squares import gram_squares, gram_squares_of_layers
from gramian.kernels.sums.token_sums import normed_sums, normed_sums_twin, token_sums
from gramian.kernels.sums.weighted_product import _HALF as PRODUCT_TILES
from gramian.kernels.sums.weighted_product import weighted_product, weighted_products_kernel
from gramian.kernels.sums.weighted_sum import row_squares, weighted_sum
from tests.kernels import LAYOUTS, laid_out
from tests.kernels.test_gram_squares import gram_squares_kernel
from tests.kernels.test_weighted_product import weighted_product_kernel

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1, 8, 16), (3, 17, 33, 65), (2, 197, 768, 200), (5, 300, 136, 520), (2, 1024, 1000, 2056)]
"""Samples, tokens, rows, columns."""


@pytest.fixture(autouse=True)
def no_tf32():
    """Nothing that the kernels are compared with is rounded to tensor float."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def sides(shape, dtype, layout="contiguous", seed=0):
    samples, tokens, rows, columns = shape
    left = random(samples, tokens, rows, dtype=dtype, seed=seed)
    right = random(samples, tokens, columns, dtype=dtype, seed=seed + 1)
    return laid_out(left, layout), laid_out(right, layout)


def gradients(left, right):
    return left.double().mT @ right.double()


def squares(left, right):
    return gradients(left, right).square().sum((1, 2))


def diagonal(left, right):
    return (left.double().square().sum(2) * right.double().square().sum(2)).sum(1)


def close(got, want, rtol=5e-5):
    """Relative to each number: for what is positive. Tensor cores cut off bits where they add: a bias, not noise."""
    assert got.is_cuda
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=0)


def close_to_scale(got, want, rtol=2e-5):
    """Relative to the largest number: for what may cancel."""
    assert got.is_cuda
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=rtol * float(want.abs().max()) + 1e-30)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_norms_in_every_layout(shape, dtype, layout):
    left, right = sides(shape, dtype, layout)
    got = gram_squares(left, right)
    close(got[0], squares(left, right))
    close(got[1], diagonal(left, right))
    close(direct_squares(left, right), squares(left, right))


def test_gram_of_sides_of_two_dtypes():
    left, right = random(2, 150, 72, dtype=torch.bfloat16), random(2, 150, 64, seed=1)
    close(gram_squares(left, right)[0], squares(left, right))
    close(direct_squares(left, right), squares(left, right))


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("tiles", GRAM_TILES, ids=str)
def test_gram_with_every_tile_and_kind_of_load(tiles, descriptor):
    if descriptor and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies need compute capability 9")
    left, right = sides((3, 1500, 264, 136), torch.bfloat16)
    got = gram_squares_kernel(left, right, tiles=tiles, descriptor=descriptor)
    close(got[0], squares(left, right))
    close(got[1], diagonal(left, right))


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("tiles", DIRECT_TILES, ids=str)
def test_direct_with_every_tile_and_kind_of_load(tiles, descriptor):
    if descriptor and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies need compute capability 9")
    left, right = sides((3, 700, 264, 600), torch.bfloat16)
    close(direct_squares_kernel(left, right, tiles=tiles, descriptor=descriptor), squares(left, right))


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("tiles", PRODUCT_TILES, ids=str)
def test_product_with_every_tile_and_kind_of_load(tiles, parts, descriptor):
    if descriptor and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies need compute capability 9")
    left, right = sides((3, 700, 264, 600), torch.bfloat16)
    weights = random(3, seed=5)
    got = weighted_product_kernel(left, right, weights, torch.float32, tiles=tiles, parts=parts, descriptor=descriptor)
    close_to_scale(got, torch.einsum("b,bmn->mn", weights.double(), gradients(left, right)))


@pytest.mark.parametrize("layers", [2, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 300, 136, 520), (2, 1024, 1000, 2056)])
def test_layers_of_one_launch_get_the_bits_of_each_alone(shape, dtype, layers):
    weights = random(shape[0], seed=5)
    pairs = [sides(shape, dtype, seed=2 * k) for k in range(layers)]
    tiles = PRODUCT_TILES[0]
    options = {"tiles": tiles, "parts": 1} if dtype != torch.float32 else {}
    totals = weighted_products_kernel(*zip(*pairs, strict=True), weights, torch.float32, **options)
    squares_KB, diagonals_KB = gram_squares_of_layers(pairs)
    for (left, right), total, squares_B, diagonal_B in zip(pairs, totals, squares_KB, diagonals_KB, strict=True):
        close_to_scale(total, torch.einsum("b,bmn->mn", weights.double(), gradients(left, right)))
        if dtype != torch.float32:
            assert total.equal(weighted_product_kernel(left, right, weights, torch.float32, **options))
        close(squares_B, squares(left, right))
        close(diagonal_B, diagonal(left, right))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weighted_product_in_every_layout(shape, dtype, layout):
    left, right = sides(shape, dtype, layout)
    weights = random(shape[0], seed=5).abs() / 3
    want = torch.einsum("b,bmn->mn", weights.double(), gradients(left, right))
    close_to_scale(weighted_product(left, right, weights, torch.float32), want)
    half = weighted_product(left, right, weights, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), want, rtol=2**-8, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_of_weight_zero_adds_nothing_whatever_it_holds(dtype):
    left, right = sides((5, 200, 136, 264), dtype)
    weights = random(5, seed=5)
    left[1], right[4], weights[1], weights[4] = float("nan"), float("inf"), 0.0, -0.0
    rows = [0, 2, 3]
    want = torch.einsum("b,bmn->mn", weights[rows].double(), gradients(left[rows], right[rows]))
    for parts in (None, 1, 7):
        got = weighted_product_kernel(left, right, weights, torch.float32, parts=parts)
        close_to_scale(got, want)
    kept = left.flatten(1)
    kept[4] = float("inf")
    close_to_scale(weighted_sum(kept, weights), weights[rows].double() @ kept[rows].double())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 17, 33), (2, 1000, 768), (2, 100, 5000), (4, 33, 11008), (1, 40, 16384)]
)
def test_sums_over_tokens_in_every_layout(shape, dtype, layout):
    x, g = (laid_out(random(*shape, dtype=dtype, seed=seed) + seed, layout) for seed in (1, 0))
    for centred in (True, False):
        products, sums = normed_sums(x, g, 1e-3, centred)
        want_products, want_sums = normed_sums_twin(x.double(), g.double(), 1e-3, centred)
        close_to_scale(products, want_products)
        close_to_scale(sums, want_sums)
    close_to_scale(token_sums(g), g.double().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (16, 100_003), (3, 1 << 22)])
def test_kept_rows(shape, dtype):
    for layout in ("contiguous", "amid nan", "columns apart"):
        kept, weights = laid_out(random(*shape, dtype=dtype), layout), random(shape[0], seed=1)
        close_to_scale(weighted_sum(kept, weights), weights.double() @ kept.double())
        close(row_squares(kept), kept.double().square().sum(1))


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES))
def test_checksums_are_those_of_the_cpu_and_nobody_waits(dtype):
    flats = [random(n, seed=n, dtype=dtype) for n in (0, 1, 7, 1024, 1 << 15, (1 << 17) + 3)]
    flats.append(torch.zeros(9, device="cuda", dtype=dtype)[1:])
    flats[2][::2] = -0.0
    first = checksums(flats)  # tables are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = checksums(flats)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.tolist() == again.tolist() == checksums([flat.cpu() for flat in flats]).tolist()


def test_checksums_see_the_end_of_a_large_tensor():
    large = torch.zeros((1 << 32) + 6, device="cuda", dtype=torch.bfloat16)
    large[-1] = 1.0
    assert checksums([large]).item() not in (0, checksums([large.flip(0)]).item())


def test_kept_rows_beyond_the_reach_of_32_bits():
    kept = torch.zeros(3, (1 << 30) + 8, device="cuda", dtype=torch.bfloat16)
    kept[2, -1], kept[1, 0] = 3.0, 2.0
    assert row_squares(kept).tolist() == [0.0, 4.0, 9.0]
    total = weighted_sum(kept, torch.tensor([1.0, 10.0, 100.0], device="cuda"))
    assert total[0] == 20 and total[-1] == 300 and total.count_nonzero() == 2


def test_tokens_beyond_the_reach_of_32_bits():
    """The last sample begins after 2³¹ elements."""
    left = torch.zeros(3, 2048, 1 << 19, device="cuda", dtype=torch.bfloat16)
    left[2, 2047, -1] = 3.0
    right = torch.zeros(3, 2048, 8, device="cuda", dtype=torch.bfloat16)
    right[2, 2047, 7] = 2.0
    for descriptor in {False, torch.cuda.get_device_capability()[0] >= 9}:
        assert gram_squares_kernel(left, right, descriptor=descriptor)[0].tolist() == [0.0, 0.0, 36.0]
        assert direct_squares_kernel(left, right, descriptor=descriptor).tolist() == [0.0, 0.0, 36.0]


@pytest.mark.parametrize("shape", [(0, 5, 16, 24), (2, 0, 16, 24), (2, 5, 0, 24)])
def test_nothing_gives_zeros(shape):
    left, right = sides(shape, torch.bfloat16)
    weights = random(shape[0])
    zeros = torch.zeros(shape[0], device="cuda")
    assert gram_squares(left, right)[0].equal(zeros) and gram_squares(left, right)[1].equal(zeros)
    assert direct_squares(left, right).equal(zeros)
    assert not weighted_product(left, right, weights, torch.float32).any()
    assert token_sums(left).equal(torch.zeros(shape[0], shape[2], device="cuda"))
    assert normed_sums(left, left, 1e-5, True)[0].shape == (shape[0], shape[2])


def everything(seed, dtype):
    """All kernels on fresh numbers: (result, float64's answer)."""
    samples, tokens, rows, columns = 4, 333, 264, 520
    left, right = sides((samples, tokens, rows, columns), dtype, seed=seed)
    weights = random(samples, seed=seed + 100).abs()
    weights[seed % samples] = 0
    got_squares, got_diagonal = gram_squares(left, right)
    products, sums = normed_sums(left, left.flip(1), 1e-5, seed % 2 == 0)
    want_products, want_sums = normed_sums_twin(left.double(), left.flip(1).double(), 1e-5, seed % 2 == 0)
    kept = right.flatten(1)
    return [
        (got_squares, squares(left, right)),
        (got_diagonal, diagonal(left, right)),
        (direct_squares(left, right), squares(left, right)),
        (
            weighted_product(left, right, weights, torch.float32),
            torch.einsum("b,bmn->mn", weights.double(), gradients(left, right)),
        ),
        (token_sums(right), right.double().sum(1)),
        (products, want_products),
        (sums, want_sums),
        (weighted_sum(kept, weights), weights.double() @ kept.double()),
        (row_squares(kept), kept.double().square().sum(1)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fresh_numbers_twenty_times(dtype):
    for seed in range(20):
        for got, want in everything(seed, dtype):
            close_to_scale(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_every_time(dtype):
    first = [got for got, _ in everything(3, dtype)]
    for _ in range(10):
        assert all(got.equal(before) for (got, _), before in zip(everything(3, dtype), first, strict=True))


@pytest.mark.parametrize("shape", [(8, 1024, 4096, 2048), (2, 1024, 32000, 4096), (1, 4096, 2048, 8192)])
def test_large_shapes(shape):
    left, right = sides(shape, torch.bfloat16)
    want = torch.stack([squares(left[b : b + 1], right[b : b + 1])[0] for b in range(shape[0])])
    got = gram_squares(left, right)
    close(got[0], want, 5e-4)
    close(got[1], diagonal(left, right), 5e-4)
    close(direct_squares(left, right), want, 5e-4)


def test_norms_write_neither_gradients_nor_gram_matrices():
    left, right = sides((8, 2048, 2048, 2048), torch.bfloat16)
    for function in (lambda: gram_squares(left, right), lambda: direct_squares(left, right)):
        function()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_the_kernels_are_what_ran(monkeypatch):
    """No twin is called for half precision on a GPU."""

    def twin(*args, **kwargs):
        raise AssertionError("a twin ran")

    for folder, name in (
        ("norms", "gram_squares"), ("norms", "direct_squares"),
        ("sums", "token_sums"), ("sums", "weighted_sum"), ("sums", "weighted_product"),
    ):  # fmt: skip
        monkeypatch.setattr(f"gramian.kernels.{folder}.{name}.{name}_twin", twin)
    monkeypatch.setattr("gramian.kernels.sums.token_sums.normed_sums_twin", twin)
    monkeypatch.setattr("gramian.kernels.sums.weighted_sum.row_squares_twin", twin)
    left, right = sides((2, 40, 16, 24), torch.bfloat16)
    weights = random(2)
    gram_squares(left, right), direct_squares(left, right), weighted_product(left, right, weights, torch.float32)
    token_sums(left), normed_sums(left, left, 1e-5, True), weighted_sum(left.flatten(1), weights)
    row_squares(left.flatten(1))
