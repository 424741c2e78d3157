"""The step of a private run (noise, division, AdamW) over fused AdamW alone, by the number of tensors, in one run.

Two models of 29 M parameters in bf16: 224 pairs of rank 16 as in LoRA (448 tensors), and seven square layers. What a step waits
for is the host where tensors are many and small, and memory where they are few and large.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import synchronize, write

CUDA = torch.cuda.is_available()
WIDTH, RANK, PAIRS = (4096, 16, 224) if CUDA else (64, 4, 224)
ROUNDS = 20


def models() -> dict[str, nn.Module]:
    """The two models on the device."""
    pairs = [
        nn.Sequential(nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)) for _ in range(PAIRS)
    ]
    width = int((2 * WIDTH * RANK * PAIRS / 7) ** 0.5)
    squares = [nn.Linear(width, width, bias=False) for _ in range(7)]
    found = {"448 tensors": nn.Sequential(*pairs), "7 tensors": nn.Sequential(*squares)}
    return {name: model.to("cuda" if CUDA else "cpu", torch.bfloat16) for name, model in found.items()}


def timed(before: Callable[[], None], step: Callable[[], Any]) -> float:
    """Median milliseconds of `step`, the device waited for, each after `before`."""
    times = []
    for _ in range(ROUNDS):
        before()
        synchronize()
        begun = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[3:])


def main() -> None:
    """Measure and write the JSON."""
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for name, model in models().items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        x = torch.randn(8, next(model.parameters()).shape[1]).to(next(model.parameters()))

        def backward(model: nn.Module = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> None:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()

        alone = timed(backward, optimizer.step)
        engine = gramian.PrivacyEngine()
        loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=8)
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False,
        )  # fmt: skip
        private = timed(backward, optimizer.step)
        engine.detach()
        rows[name] = {"parameters": sum(p.numel() for p in model.parameters()), "adamw": alone, "private": private}
        print(name, rows[name], flush=True)
    print(write("private_release" if CUDA else "private_release_cpu", rows))


if __name__ == "__main__":
    main()
