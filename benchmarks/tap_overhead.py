"""What taps cost a training step: installed with nobody listening (must be ≤ 2 %), and with statistics on.

A GPT of 12 layers and width 768 (forward, backward, AdamW), bf16 autocast on a GPU. On a CPU a small one stands in, so that
the script can be tried anywhere; only the GPU numbers are committed.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import gramian
from benchmarks._timing import ratio, take_turns, write
from gramian.models.gpt import GPT, GPTConfig
from gramian.taps import hub_of


def make_step(model: torch.nn.Module, call: Any, batch: int, length: int, vocabulary: int) -> Callable[[], Any]:
    """One training step on fixed data."""
    device = next(model.parameters()).device
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = call(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(config: GPTConfig, batch: int, compiled: bool, rounds: int, steps: int, device: str) -> dict[str, Any]:
    """Seconds per step: untouched, taps idle, per-sample norms on; peak memory of each on CUDA."""
    torch._dynamo.reset()
    variants: dict[str, Callable[[], Any]] = {}
    for name in ("untouched", "untouched again", "taps idle", "per-sample norms"):
        model = GPT(config).to(device)
        if name == "taps idle":
            hub_of(model).install()
        call = torch.compile(model, fullgraph=True) if compiled else model
        step = make_step(model, call, batch, config.context, config.vocabulary)
        if name == "per-sample norms":
            plain = step

            def step(model: torch.nn.Module = model, plain: Callable[[], Any] = plain) -> None:
                with gramian.per_sample_norms(model, loss_reduction="mean", audit=False):
                    plain()

        variants[name] = step
    times = take_turns(variants, rounds, steps, warm_up=5)
    memory = {}
    if device == "cuda":
        for name, step in variants.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    base = times["untouched"]
    return {
        "batch": batch,
        "length": config.context,
        "mode": "compiled" if compiled else "eager",
        "milliseconds": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "ratio": {name: ratio(values, base) for name, values in times.items()},
        "peak_gib_above_start": memory,
    }


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = [(8, 1024), (16, 512)] if device == "cuda" else [(4, 64)]
    results = []
    for batch, length in shapes:
        for compiled in (False, True):
            size = (
                {"layers": 12, "width": 768, "heads": 12}
                if device == "cuda"
                else {"layers": 2, "width": 64, "heads": 2}
            )
            config = GPTConfig(vocabulary=32768 if device == "cuda" else 256, context=length, **size)
            row = measure(config, batch, compiled, options.rounds, options.steps, device)
            results.append(row)
            ratios = ", ".join(f"{name} {value:.4f}" for name, value in row["ratio"].items())
            print(
                f"B={batch} T={length} {row['mode']}: {row['milliseconds']['untouched']:.2f} ms; {ratios}", flush=True
            )
    print(write("tap_overhead" if device == "cuda" else "tap_overhead_cpu", results))


if __name__ == "__main__":
    main()
