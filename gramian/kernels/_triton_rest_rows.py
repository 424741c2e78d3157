"""The Triton kernels of rest_rows.py. Importing this file imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from gramian.kernels._triton_distill_rows import squash, squash_derivative


@triton.jit
def rest_rows(
    out,
    products,
    temperature,
    scale,
    cap,
    vocabulary,
    out_stride,
    stride,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the largest logit, log Σ exp(u z), the mean of z under it, log Σ exp(z)."""
    token = tl.program_id(0).to(tl.int64)
    products += token * stride
    lanes = tl.arange(0, BLOCK)
    u = 1 / tl.load(temperature)
    largest = -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    total_1 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        x = tl.load(products + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
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
        largest = new
    whole = tl.sum(total, 0)
    out += token
    tl.store(out, largest)
    tl.store(out + out_stride, u * largest + tl.log(whole))
    tl.store(out + 2 * out_stride, tl.sum(weighted, 0) / whole)
    tl.store(out + 3 * out_stride, largest + tl.log(tl.sum(total_1, 0)))


@triton.jit
def rest_gradient(
    products,
    targets,
    temperature,
    rows,
    ce_weight,
    scale,
    cap,
    vocabulary,
    ignore_index,
    row_stride,
    stride,
    target_stride,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: (factor · exp(u z − lse) + ce_weight · (exp(z − lse₁) − onehot)) · dz/dx, in place of x."""
    token = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    place = products + token * stride + ids
    target = tl.load(targets + token * target_stride).to(tl.int64)
    factor = tl.load(rows + token)
    lse = tl.load(rows + row_stride + token)
    lse_1 = tl.load(rows + 2 * row_stride + token)
    u = 1 / tl.load(temperature)
    x = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    there = (x != -float("inf")) & (target != ignore_index)
    z = squash(tl.where(there, x, 0.0), scale, cap, CAP)
    dz = factor * tl.exp(u * z - lse) + ce_weight * tl.exp(z - lse_1) - tl.where(ids == target, ce_weight, 0.0)
    dx = tl.where(there, squash_derivative(dz, z, scale, cap, CAP), 0.0)
    tl.store(place, dx.to(products.dtype.element_ty), mask=inside)
