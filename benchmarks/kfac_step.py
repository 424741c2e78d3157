"""The whole training step with K-FAC on over the plain step with fused AdamW, every step timed, in one run.

"precondition": natural gradients in front of SGD. "optimizer": `gramian.optim.KFAC` with its defaults.

GPT of 12 layers of width 768 (vocabulary 50257) and of 4 layers of width 2048 (vocabulary 32000), 16 × 1024 tokens, float32
weights, bf16 autocast; `precondition` on SGD, a refresh every 10 steps from 2,048 tokens. "exact" is the exact path at every
step, which analysis uses; "kernels" is what runs on the GPU in one step. On a CPU a small model stands in.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gramian
from benchmarks._timing import kernels, seconds, write
from gramian.curvature.apply.natural_gradient import gradients_of, ready_natural_gradient
from gramian.models.gpt import GPT, GPTConfig

SHAPES = {
    "12 x 768": GPTConfig(vocabulary=50257, context=1024, layers=12, width=768, heads=12),
    "4 x 2048": GPTConfig(vocabulary=32000, context=1024, layers=4, width=2048, heads=16),
}
SMALL = {"2 x 64": GPTConfig(vocabulary=500, context=64, layers=2, width=64, heads=4)}
EVERY = 10
"""Steps from one refresh to the next."""


def measure(config: GPTConfig, device: str, steps: int) -> dict[str, Any]:
    """Times of the plain step and of steps with K-FAC, and how far ready operators are from the exact path."""
    cuda = device == "cuda"
    torch.manual_seed(0)
    batch = 16 if cuda else 4
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1), device=device)
    terms = batch * config.context

    def backward(model: GPT) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    model = GPT(config).to(device)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def plain_step() -> None:
        backward(model)
        plain.step()

    found: dict[str, Any] = {}
    _times(plain_step, 30 if cuda else 5)
    own = gramian.optim.KFAC(model, lr=1e-5, update_freq=2 * EVERY)

    def own_step() -> None:
        with own.capture(num_terms=terms):
            backward(model)
        own.step()

    found["optimizer"] = _ratios(own_step, own.kfac, 2 * EVERY, steps, plain_step)
    while own.kfac.steps % (2 * EVERY) < 5:  # the next step neither refreshes nor is recorded
        own_step()
    found["kernels"] = {
        "plain": kernels(plain_step),
        "plain, optimizer alone": kernels(plain.step),
        "between refreshes": kernels(own_step),
        "between refreshes, optimizer alone": kernels(own.step),
    }
    kfac = gramian.KFACNaturalGradient(update_freq=EVERY, max_tokens=min(2048, terms // 2))
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=1e-3), model, kfac)

    def kfac_step() -> None:
        with kfac.capture(model, num_terms=terms):
            backward(model)
        optimizer.step()

    found["precondition"] = _ratios(kfac_step, kfac, EVERY, steps, plain_step)
    found["operators"] = kfac.record()["operators"]

    def exact_step() -> None:
        backward(model)
        kfac.compute_natural_gradient(model)

    found["exact, between"] = statistics.median(_times(exact_step, 5)) / statistics.median(_times(plain_step, 5))
    backward(model)
    gradients = gradients_of(model)
    found["error"] = _difference(
        ready_natural_gradient(kfac.state, model, gradients), kfac.compute_natural_gradient(model)
    )
    return found


def _ratios(
    step: Callable[[], None],
    kfac: gramian.KFACNaturalGradient,
    every: int,
    steps: int,
    plain_step: Callable[[], None],
) -> dict[str, float | None]:
    """Times of steps over the plain step, after two refreshes: on average, between refreshes, with one, and the longest.

    A few plain steps run between two refreshes: a GPU slows down as it warms up.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2 * every):
        step()
    marked, base = [], []
    for number in range(steps):
        before = kfac.refreshes
        took = seconds(step, 1)
        marked.append((took, kfac.refreshes > before))
        if number % every == every // 2:
            base += _times(plain_step, 6)
    plain = statistics.median(base)
    refreshes, between = [t for t, fresh in marked if fresh], [t for t, fresh in marked if not fresh]
    return {
        "plain_ms": plain * 1e3,
        "mean": statistics.mean(took for took, _ in marked) / plain,
        "between": statistics.median(between) / plain,
        "refresh": statistics.median(refreshes) / plain,
        "worst": max(took for took, _ in marked) / plain,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def _times(step: Callable[[], None], count: int) -> list[float]:
    step()
    return [seconds(step, 1) for _ in range(count)]


def _difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of two vectors over all parameters, and the largest of a single parameter."""
    each = {name: float((left[name] - t).norm() / t.norm().clamp(min=1e-30)) for name, t in right.items()}
    off = sum(float((left[name] - t).double().square().sum()) for name, t in right.items())
    whole = sum(float(t.double().square().sum()) for t in right.values())
    worst = max(each, key=lambda name: each[name])
    return {"whole": (off / whole) ** 0.5, "largest": each[worst], "of": worst}  # type: ignore[dict-item]


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    results: dict[str, Any] = {}
    for name, config in (SHAPES if cuda else SMALL).items():
        results[name] = measure(config, "cuda" if cuda else "cpu", options.steps)
        print(name, results[name], flush=True)
        path = write("kfac_step" if cuda else "kfac_step_cpu", results)
    print(path)


if __name__ == "__main__":
    main()
