"""The Triton kernels of rest_rows.py: student sums over ids that a sparse teacher omits. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels.distillation._triton_distill_rows import squash, squash_derivative


@triton.jit
def _add_block(x, u, scale, cap, largest, total, weighted, total_1, CAP: tl.constexpr):
    """Add one block of head products x, with logits z, to the running sums of exp(u z), z exp(u z) and exp(z); skip x = −inf.

    The sums are relative to the `largest` logit so far. Returns the new largest, and the three sums.
    """
    there = x != -float("inf")
    z = squash(tl.where(there, x, 0.0), scale, cap, CAP)
    new = tl.maximum(largest, tl.max(tl.where(there, z, -float("inf")), 0))
    # Until an id is there nothing is added and nothing is rescaled.
    base = tl.where(new > -float("inf"), new, 0.0)
    shrink = tl.where(largest > -float("inf"), tl.exp(u * (largest - base)), 0.0)
    shrink_1 = tl.where(largest > -float("inf"), tl.exp(largest - base), 0.0)
    share = tl.where(there, tl.exp(u * (z - base)), 0.0)
    total = total * shrink + share
    weighted = weighted * shrink + share * z
    total_1 = total_1 * shrink_1 + tl.where(there, tl.exp(z - base), 0.0)
    return new, total, weighted, total_1


@triton.jit
def rest_rows(
    out, products, temperature, scale, cap, vocabulary, aligned, out_stride, stride,
    CAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row of products: its largest logit z, log Σ exp(u z), Σ z exp(u z) / Σ exp(u z) and log Σ exp(z), u = 1/temperature.

    A product of −inf is left out. `aligned` is the largest multiple of 16 up to `vocabulary`; the ids beyond it are a block of
    their own, so that all other loads are vectorised.
    """
    token = tl.program_id(0).to(tl.int64)
    products += token * stride
    lanes = tl.arange(0, BLOCK)
    u = 1 / tl.load(temperature)
    largest = -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    total_1 = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, aligned, BLOCK, num_stages=STAGES):
        ids = start + lanes
        x = tl.load(products + ids, mask=ids < aligned, other=-float("inf")).to(tl.float32)
        largest, total, weighted, total_1 = _add_block(x, u, scale, cap, largest, total, weighted, total_1, CAP)
    if aligned < vocabulary:
        ids = aligned + lanes
        x = tl.load(products + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
        largest, total, weighted, total_1 = _add_block(x, u, scale, cap, largest, total, weighted, total_1, CAP)
    whole = tl.sum(total, 0)
    out += token
    tl.store(out, largest)
    tl.store(out + out_stride, u * largest + tl.log(whole))
    tl.store(out + 2 * out_stride, tl.sum(weighted, 0) / whole)
    tl.store(out + 3 * out_stride, largest + tl.log(tl.sum(total_1, 0)))


@triton.jit
def _write_block(
    products, ids, inside, counts, target, u, factor, lse, lse_1, ce_weight, scale, cap, CAP: tl.constexpr
):
    x = tl.load(products + ids, mask=inside, other=-float("inf")).to(tl.float32)
    there = (x != -float("inf")) & counts
    z = squash(tl.where(there, x, 0.0), scale, cap, CAP)
    dz = factor * tl.exp(u * z - lse) + ce_weight * tl.exp(z - lse_1) - tl.where(ids == target, ce_weight, 0.0)
    dx = tl.where(there, squash_derivative(dz, z, scale, cap, CAP), 0.0)
    tl.store(products + ids, dx.to(products.dtype.element_ty), mask=inside)


@triton.jit
def rest_gradient(
    products, targets, temperature, rows, ce_weight, scale, cap, vocabulary, aligned, ignore_index,
    row_stride, stride, target_stride, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row: replace products x by (factor · exp(u z − lse) + ce_weight · (exp(z − lse₁) − onehot)) · dz/dx.

    z is the logit of x, u = 1/temperature; `rows` has factor, lse and lse₁ of each row; onehot is 1 at the target. The result
    is 0 where x is −inf and in rows whose target is `ignore_index`. The program of the first block also writes the ids from
    `aligned`, a multiple of 16, to the end.
    """
    token = tl.program_id(1).to(tl.int64)
    products += token * stride
    lanes = tl.arange(0, BLOCK)
    target = tl.load(targets + token * target_stride).to(tl.int64)
    counts = target != ignore_index
    factor = tl.load(rows + token)
    lse = tl.load(rows + row_stride + token)
    lse_1 = tl.load(rows + 2 * row_stride + token)
    u = 1 / tl.load(temperature)
    ids = tl.program_id(0) * BLOCK + lanes
    _write_block(products, ids, ids < aligned, counts, target, u, factor, lse, lse_1, ce_weight, scale, cap, CAP)
    if (tl.program_id(0) == 0) & (aligned < vocabulary):
        ids = aligned + lanes
        _write_block(
            products, ids, ids < vocabulary, counts, target, u, factor, lse, lse_1, ce_weight, scale, cap, CAP
        )  # fmt: skip
