"""Which exact algorithm computes the per-sample gradient norms of a linear layer with the least work.

With T tokens per sample, inputs A [T, N], output gradients G [T, M] and a weight of M×N, per sample:

* direct, ‖GᵀA‖²: 2·T·M·N FLOPs and an M×N matrix to write and read;
* Gram, ⟨AAᵀ, GGᵀ⟩: 2·T²·(M+N) FLOPs and two T×T matrices.

Both products run as batched GEMMs, so they break even at T = M·N/(M+N), half the harmonic mean of M and N.
"""

from typing import Literal

Algorithm = Literal["auto", "direct", "gram"]
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "direct", "gram")

CHUNK_ELEMENTS = 1 << 25
"""Per-sample gradients are formed in chunks of samples with at most this many elements (128 MiB in float32)."""


def choose(tokens: int, rows: int, columns: int) -> Literal["rank1", "direct", "gram"]:
    """The cheapest exact norm algorithm for `tokens` tokens per sample and a weight of `rows` × `columns`.

    "rank1" for a single token (‖g‖²‖a‖², output gradient g and input a), else the cheaper of "direct" and "gram".
    """
    if tokens == 1:
        return "rank1"
    return "gram" if tokens * (rows + columns) < rows * columns else "direct"


def samples_per_chunk(gradient_elements: int) -> int:
    """Number of per-sample gradients of `gradient_elements` elements each that are formed at once, at least 1."""
    return max(1, CHUNK_ELEMENTS // max(1, gradient_elements))
