"""The kernels of private training alone, beside what torch offers: rates that the planner's constants come from."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._timing import seconds, write
from gramian.kernels.chacha import add_normals_
from gramian.kernels.checksums import checksums
from gramian.kernels.launch import Tiles
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares, gram_squares_kernel
from gramian.kernels.sums.token_sums import normed_sums, token_sums
from gramian.kernels.sums.weighted_product import weighted_product
from gramian.kernels.sums.weighted_sum import row_squares, weighted_sum
from gramian.taps.gradients import Outer


def milliseconds(work: Callable[[], Any]) -> float:
    """Median over a few blocks, warm."""
    seconds(work, 3)
    return 1e3 * statistics.median(seconds(work, 5) for _ in range(5))


def gram_by_bmm(left: Tensor, right: Tensor) -> Tensor:
    """Two batched products, their product and its sum."""
    return (torch.bmm(left, left.mT).float() * torch.bmm(right, right.mT).float()).sum((1, 2))


def main() -> None:
    """Measure and write the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    small = device == "cpu"
    rows: dict[str, Any] = {}

    def note(name: str, took: float, flops: float = 0.0, nbytes: float = 0.0) -> None:
        rows[name] = {
            "milliseconds": took,
            "teraflops": flops / took / 1e9,
            "gigabytes_per_second": nbytes / took / 1e6,
        }
        print(f"{name}: {took:.3f} ms, {flops / took / 1e9:.0f} TFLOP/s, {nbytes / took / 1e6:.0f} GB/s", flush=True)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def linear(B: int, T: int, M: int, N: int) -> None:
        left, right = randn(B, T, M), randn(B, T, N)
        shape = f"{B}x{T}x{M}x{N}"
        flops = B * T * (T + 128) * (M + N)
        note(f"gram {shape}", milliseconds(lambda: gram_squares(left, right)), flops)
        if not small and T <= 1024:
            note(f"gram by bmm {shape}", milliseconds(lambda: gram_by_bmm(left, right)), flops)
            for stages, depth, warps in ((3, 64, 8), (3, 128, 8), (2, 128, 8)):
                tiles = Tiles(rows=128, columns=128, depth=depth, warps=warps, stages=stages, cost=1.0)
                try:
                    took = milliseconds(lambda tiles=tiles: gram_squares_kernel([(left, right)], tiles=tiles))
                    note(f"gram {shape} stages {stages} depth {depth} warps {warps}", took, flops)
                except Exception as error:  # does not fit
                    print("gram", shape, stages, depth, type(error).__name__)
        if M <= 8192:
            products = 2 * B * T * M * N
            weights = torch.rand(B, device=device)
            outer = Outer(left, right)
            note(f"direct {shape}", milliseconds(lambda: direct_squares(left, right)), products)
            note(f"product {shape}", milliseconds(lambda: left.flatten(0, 1).mT @ right.flatten(0, 1)), products)
            note(f"scaled product {shape}", milliseconds(lambda: outer.weighted_total(weights, dtype)), products)
            note(
                f"weighted product {shape}",
                milliseconds(lambda: weighted_product(left, right, weights, dtype)),
                products,
            )
            if B <= 4:
                note(f"per-sample product {shape}", milliseconds(lambda: torch.bmm(left.mT, right)), products)

    shapes = [(2, 64, 32, 48)] if small else [
        (64, 256, 2048, 2048), (64, 256, 6144, 2048), (16, 1024, 2048, 2048), (16, 1024, 6144, 2048),
        (16, 1024, 8192, 2048), (16, 1024, 32000, 2048), (4, 4096, 8192, 2048),
    ]  # fmt: skip
    for shape in shapes:
        linear(*shape)
    tokens = (2, 64, 48) if small else (16, 1024, 2048)
    x, g = randn(*tokens), randn(*tokens)
    note("normed_sums", milliseconds(lambda: normed_sums(x, g, 1e-5, True)), nbytes=2 * x.nbytes)
    wide = randn(*tokens[:2], 4 * tokens[2])
    note("token_sums", milliseconds(lambda: token_sums(wide)), nbytes=wide.nbytes)
    note("token_sums by torch", milliseconds(lambda: wide.sum(1, dtype=torch.float32)), nbytes=wide.nbytes)
    kept = randn(4, 2**12 if small else 2**26)
    weights = torch.rand(4, device=device)
    note("weighted_sum", milliseconds(lambda: weighted_sum(kept, weights)), nbytes=kept.nbytes)
    note("row_squares", milliseconds(lambda: row_squares(kept)), nbytes=kept.nbytes)
    note("checksums", milliseconds(lambda: checksums([*kept])), nbytes=kept.nbytes)
    noise = torch.zeros(2**12 if small else 2**28, device=device)
    std = torch.ones((), device=device)
    note("add_normals_", milliseconds(lambda: add_normals_(noise, bytes(32), 1, 0, std)), nbytes=2 * noise.nbytes)
    print(write("clip_kernels" if not small else "clip_kernels_cpu", rows))


if __name__ == "__main__":
    main()
