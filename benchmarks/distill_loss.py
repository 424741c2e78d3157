"""The fused distillation loss, forward and backward, beside eager torch and Liger's chunked loss, in one run.

Forward KL at T = 2 and cross entropy, from hidden states in bfloat16. Ours has a learnable temperature and its metrics; the
others have neither. Memory is the peak above what is allocated once inputs, weights and their gradients exist.
Liger is not a dependency: `pip install --no-deps liger-kernel==0.8.5`.
"""

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._timing import ratio, seconds, take_turns, write
from gramian.distill import distill_loss
from gramian.kernels.distillation.distill_rows import RowObjective, distill_rows_kernel

ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Shape:
    tokens: int
    student: int
    teacher: int
    vocabulary: int

    def __str__(self) -> str:
        return f"N={self.tokens} ds={self.student} dt={self.teacher} V={self.vocabulary}"


SHAPES = [Shape(8192, 1024, 2048, 50257), Shape(8192, 2048, 4096, 128256)] if ON_GPU else [Shape(64, 16, 32, 1001)]
TEMPERATURE, KD, CE = 2.0, 1.0, 0.5


@dataclass
class Inputs:
    student_hidden: Tensor
    student_weight: Tensor
    targets: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor


def inputs(shape: Shape) -> Inputs:
    """Drawn, with logits of about unit size and a twentieth of the tokens masked; gradients exist."""
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    torch.manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    hidden, weight = draw(shape.tokens, shape.student), draw(shape.vocabulary, shape.student).div_(shape.student**0.5)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    targets[::20] = -100
    for leaf in (hidden, weight):
        leaf.requires_grad_().grad = torch.zeros_like(leaf)
    teacher = draw(shape.vocabulary, shape.teacher).div_(shape.teacher**0.5)
    return Inputs(hidden, weight, targets, draw(shape.tokens, shape.teacher), teacher)


def ours(x: Inputs, learnable: bool = True, **options: Any) -> Callable[[], Tensor]:
    heat = torch.tensor(TEMPERATURE, device=x.targets.device, requires_grad=learnable)
    heat.grad = torch.zeros_like(heat) if learnable else None

    def step() -> Tensor:
        out = distill_loss(
            x.student_hidden, x.student_weight, x.targets, x.teacher_hidden, x.teacher_weight,
            temperature=heat, kd_weight=KD, ce_weight=CE, **options,
        )  # fmt: skip
        out.loss.backward()
        return out.loss.detach()

    return step


def cross_entropy_alone(x: Inputs) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = distill_loss(x.student_hidden, x.student_weight, x.targets, kd_weight=0.0, ce_weight=1.0).loss
        loss.backward()
        return loss.detach()

    return step


def sparse(x: Inputs, kept: int = 64) -> Callable[[], Tensor]:
    """From the largest logits, without a tail."""
    with torch.no_grad():
        rows = [(hidden @ x.teacher_weight.T).topk(kept) for hidden in x.teacher_hidden.split(1024)]
    ids, values = torch.cat([row.indices for row in rows]), torch.cat([row.values for row in rows])

    def step() -> Tensor:
        loss = distill_loss(
            x.student_hidden, x.student_weight, x.targets, teacher_topk=(ids, values, None),
            temperature=TEMPERATURE, kd_weight=KD, ce_weight=CE,
        ).loss  # fmt: skip
        loss.backward()
        return loss.detach()

    return step


def eager(x: Inputs) -> Callable[[], Tensor]:
    def step() -> Tensor:
        student = (x.student_hidden @ x.student_weight.T).float()
        with torch.no_grad():
            teacher = ((x.teacher_hidden @ x.teacher_weight.T).float() / TEMPERATURE).log_softmax(1)
        valid = x.targets != -100
        log_q = (student / TEMPERATURE).log_softmax(1)
        rows = F.kl_div(log_q, teacher, reduction="none", log_target=True).sum(1)
        kl = torch.where(valid, rows, 0.0).sum() / valid.sum()
        loss = KD * TEMPERATURE**2 * kl + CE * F.cross_entropy(student, x.targets)
        loss.backward()
        return loss.detach()

    return step


def liger(x: Inputs) -> Callable[[], Tensor] | None:
    try:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
    except ImportError:
        print("Liger is left out: pip install --no-deps liger-kernel==0.8.5", flush=True)
        return None
    # beta = 0 is the forward KL; T² goes into the weight.
    loss_of = LigerFusedLinearJSDLoss(
        weight_hard_loss=CE, weight_soft_loss=KD * TEMPERATURE**2, beta=0.0, temperature=TEMPERATURE, compiled=ON_GPU
    )

    def step() -> Tensor:
        loss = loss_of(x.student_hidden, x.student_weight, x.teacher_hidden, x.teacher_weight, x.targets)
        loss.backward()
        return loss.detach()

    return step


def products(x: Inputs) -> Callable[[], None]:
    """The four matrix products alone, on whole logits."""
    hidden, weight = x.student_hidden.detach(), x.student_weight.detach()

    def step() -> None:
        student = hidden @ weight.T
        x.teacher_hidden @ x.teacher_weight.T
        student @ weight
        student.T @ hidden

    return step


def extra_bytes(step: Callable[[], Any]) -> int | None:
    """Peak above what is allocated before, in a warm step."""
    if not ON_GPU:
        return None
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(shape: Shape) -> dict[str, Any]:
    x = inputs(shape)
    variants: dict[str, Callable[[], Any]] = {
        "ours": ours(x),
        "ours, fixed temperature": ours(x, learnable=False),
        "ours, reverse": ours(x, direction="reverse"),
        "ours, jsd": ours(x, direction="jsd"),
        "ours, top 64": sparse(x),
        "ours, cross entropy alone": cross_entropy_alone(x),
        "eager": eager(x),
        "products alone": products(x),
    }
    peer = liger(x)
    if peer is not None:
        variants["liger"] = peer
    losses = {name: float(step()) for name, step in variants.items() if name in ("ours", "eager", "liger")}
    extra = {name: extra_bytes(step) for name, step in variants.items()}
    torch.cuda.empty_cache()
    times = take_turns(variants, rounds=7 if ON_GPU else 3, steps=5 if ON_GPU else 2, warm_up=3 if ON_GPU else 1)
    result: dict[str, Any] = {}
    for name in variants:
        result[name] = {"milliseconds": 1e3 * statistics.median(times[name]), "extra_bytes": extra[name]}
        if name in losses:
            result[name]["loss"] = losses[name]
        if peer is not None:
            result[name]["time over liger"] = ratio(times[name], times["liger"])
        memory = "" if extra[name] is None else f", +{extra[name] / 1e9:.2f} GB"
        print(f"{shape} {name}: {result[name]['milliseconds']:.2f} ms{memory}", flush=True)
    return result


def tune(shape: Shape) -> None:
    """The pass over the logits alone, on one chunk, with other blocks; milliseconds for all tokens."""
    tokens, device = min(1024, shape.tokens), "cuda"
    width = -(-shape.vocabulary // 64) * 64
    student = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)[:, : shape.vocabulary]
    teacher = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)[:, : shape.vocabulary]
    targets = torch.randint(shape.vocabulary, (tokens,), device=device)
    heat = torch.tensor(TEMPERATURE, device=device)
    for direction in ("forward", "jsd"):
        for block, warps, stages in itertools.product((512, 1024, 2048, 4096), (4, 8, 16), (2, 3, 4)):
            if not 2 <= block // (32 * warps) <= 8:
                continue

            def step(direction: str = direction, block: int = block, warps: int = warps, stages: int = stages) -> None:
                distill_rows_kernel(
                    student, teacher, targets, heat, RowObjective(direction),
                    gradient=True, block=block, warps=warps, stages=stages,
                )  # fmt: skip

            seconds(step, 2)
            took = 1e3 * statistics.median(seconds(step, 5) for _ in range(5)) * shape.tokens / tokens
            print(f"{shape} {direction} block {block} warps {warps} stages {stages}: {took:.2f} ms", flush=True)


def main() -> None:
    """Measure and write the JSON; with --tune, try blocks of the kernel instead."""
    if "--tune" in sys.argv[1:]:
        for shape in SHAPES:
            tune(shape)
        return
    results = {str(shape): measure(shape) for shape in SHAPES}
    print(write("distill_loss" if ON_GPU else "distill_loss_cpu", results))


if __name__ == "__main__":
    main()
