"""What the row proof costs: once for a structure of inputs, before the first private batch of the GPT of `private_step`.

Seconds of the first forward over those of a plain training step, the number of runs, and the peak of both. On a CPU a small
model stands in.
"""

import argparse
import copy
import time
import warnings
from typing import Any

import torch

from benchmarks._timing import seconds, synchronize, write
from benchmarks.private_step import ours, peak, plain
from gramian.models.gpt import GPT, GPTConfig
from gramian.taps.hub import hub_of


def measure(base: GPT, length: int, tokens: int) -> dict[str, Any]:
    """The proof at one length."""
    x = torch.randint(base.config.vocabulary, (max(2, tokens // length), length), device=base.head.weight.device)
    plain_step = plain(base, x)
    plain_step()
    found: dict[str, Any] = {
        "batch": len(x),
        "plain_seconds": seconds(plain_step, 3),
        "plain_peak_gib": peak(plain_step),
    }
    base.zero_grad()
    model = copy.deepcopy(base)
    _, engine, _ = ours(model, x)
    torch.cuda.reset_peak_memory_stats() if x.is_cuda else None
    synchronize()
    begun = time.perf_counter()
    model(x)
    synchronize()
    found["seconds"] = time.perf_counter() - begun
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if x.is_cuda else 0.0
    (proven,) = hub_of(model).proof.proven.values()
    found |= {"runs": proven.runs, "bit for bit": proven.exact, "alone": proven.alone, "reversed": proven.reversal}
    found["plain_steps"] = found["seconds"] / found["plain_seconds"]
    engine.detach()
    return found


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    cuda = torch.cuda.is_available()
    lengths = arguments.lengths or ([256, 1024, 4096] if cuda else [32, 64])
    shape = {"vocabulary": 32000, "layers": 16, "width": 2048, "heads": 16}
    small = {"vocabulary": 256, "layers": 2, "width": 64, "heads": 4}
    base = GPT(GPTConfig(context=max(lengths), **(shape if cuda else small)))
    base = base.to(device="cuda", dtype=torch.bfloat16) if cuda else base
    results: dict[str, Any] = {"config": vars(base.config), "lengths": {}}
    for length in lengths:
        results["lengths"][length] = measure(base, length, 16384 if cuda else 512)
        print(length, results["lengths"][length], flush=True)
    print(write("row_proof" if cuda else "row_proof_cpu", results))


if __name__ == "__main__":
    main()
