"""What each optimisation of the clipped sum is worth: switched off in turn, time and peak memory over the default.

The private step here is forward, backward, clip, noise and SGD. On a GPU: the GPT of `private_step.py` with 4 layers (width
2048, vocabulary 32000, bf16); on a CPU a small one, so that the script can be tried anywhere. Three shapes of a full step, and
one of few tokens, where memory peaks while the sums are formed. "default again" is a second model with nothing switched off:
what differs there is noise. Overlap is measured on several processes: one per GPU under NCCL, two under gloo on a CPU; with a
single GPU there is nobody to wait for, and the row shows what it costs then.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import ratio, synchronize, take_turns, write
from gramian.models.gpt import GPT, GPTConfig
from gramian.privacy import Tuning
from gramian.verify.profiles.measurements import highest_on_cpu

DEFAULT, AGAIN = "default", "default again"
LOCAL = ("release", "adaptive", "layerwise")


def build(config: GPTConfig, device: str, parallel: str) -> nn.Module:
    """The same weights for every variant."""
    model = GPT(config).to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    if parallel == "ddp":
        return DistributedDataParallel(model)
    if parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def private_step(
    model: nn.Module, x: torch.Tensor, tuning: Tuning, processes: int = 1
) -> tuple[Callable[[], None], gramian.PrivacyEngine]:
    """A whole private step on a fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    loader = DataLoader(TensorDataset(torch.zeros(100 * len(x) * processes, 1)), batch_size=len(x))
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=0)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, tuning=tuning,
    )  # fmt: skip

    def step() -> None:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, engine


def above_start(step: Callable[[], None]) -> float:
    """GiB that one step needs above what is there when it begins."""
    if not torch.cuda.is_available():
        return (highest_on_cpu(step) or 0) / 2**30
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def compare(
    make: Callable[[Tuning], tuple[Callable[[], None], gramian.PrivacyEngine]], off: tuple[str, ...], rounds: int
) -> dict[str, Any]:
    """Every variant over the default, in turns."""
    names = {DEFAULT: Tuning(), AGAIN: Tuning()}
    names |= {f"without {field}": dataclasses.replace(Tuning(), **{field: False}) for field in off}
    made = {name: make(tuning) for name, tuning in names.items()}
    steps = {name: step for name, (step, _) in made.items()}
    times = take_turns(steps, rounds, steps=3, warm_up=3)
    memory = {name: above_start(step) for name, step in steps.items()}
    ways: dict[str, dict[str, int]] = {}
    for name, (_, engine) in made.items():
        assert engine.plan is not None
        ways[name] = {}
        for row in engine.plan.rows:
            ways[name][row.way] = ways[name].get(row.way, 0) + 1
    return {
        "milliseconds": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "time_over_default": {name: ratio(values, times[DEFAULT]) for name, values in times.items()},
        "gib_above_start": memory,
        "memory_over_default": {name: value / memory[DEFAULT] for name, value in memory.items()},
        "ways": ways,
    }


def on_processes(rank: int, processes: int, config: GPTConfig, batch: int, rounds: int, folder: str) -> None:
    """One process of the comparison of overlap; the first writes what it saw."""
    warnings.filterwarnings("ignore", message=".*poisson_sampling.*")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
    )
    try:
        torch.manual_seed(rank)
        x = torch.randint(config.vocabulary, (batch, config.context), device=device)
        found = {
            parallel: compare(
                lambda tuning, p=parallel: private_step(build(config, device, p), x, tuning, processes),
                ("overlap", "layerwise"),
                rounds,
            )
            for parallel in ("ddp", "fsdp2")
        }
        if rank == 0:
            torch.save(found, os.path.join(folder, "found.pt"))
    finally:
        dist.destroy_process_group()


def show(title: str, row: dict[str, Any]) -> None:
    """One line per variant."""
    for name, over in row["time_over_default"].items():
        print(
            f"{title} {name}: {row['milliseconds'][name]:.2f} ms, time x {over:.3f}, memory x "
            f"{row['memory_over_default'][name]:.3f}",
            flush=True,
        )


def main() -> None:
    """Run every shape and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*poisson_sampling.*")
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    size = (
        {"layers": 4, "width": 2048, "heads": 16, "vocabulary": 32000}
        if cuda
        else {"layers": 2, "width": 128, "heads": 4, "vocabulary": 512}
    )
    shapes = ((64, 256), (16, 1024), (4, 4096), (2, 1024)) if cuda else ((64, 16), (16, 64), (4, 256), (2, 64))
    torch.manual_seed(0)
    results: dict[str, Any] = {"model": size, "one process": {}}
    for batch, length in shapes:
        config = GPTConfig(context=length, **size)
        x = torch.randint(config.vocabulary, (batch, length), device=device)
        row = compare(
            lambda tuning, c=config, x=x: private_step(build(c, device, ""), x, tuning), LOCAL, options.rounds
        )
        results["one process"][f"B={batch} T={length}"] = row
        show(f"B={batch} T={length}", row)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    processes = max(1, torch.cuda.device_count()) if cuda else 2
    batch, length = shapes[-1]
    with tempfile.TemporaryDirectory() as folder:
        config = GPTConfig(context=length, **size)
        multiprocessing.spawn(on_processes, (processes, config, batch, options.rounds, folder), nprocs=processes)
        found = torch.load(os.path.join(folder, "found.pt"))
    results[f"{processes} processes, B={batch} T={length} on each"] = found
    for parallel, row in found.items():
        show(f"{processes} x {parallel}", row)
    print(write("clip_tuning" if cuda else "clip_tuning_cpu", results))


if __name__ == "__main__":
    main()
