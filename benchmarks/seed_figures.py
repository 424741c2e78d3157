"""Three performance figures of the notes that `docs/how-to/from_the_notes.md` maps, measured here as ratios in one run.

compile    a training step with compile.mode "default" against the eager one; the notes say 1.3 to 1.8 times as fast
recompute  a training step with parallel.checkpoint_blocks against stored activations; the notes say a third more time
adaptive   per-sample norms by the worse algorithm against the better one, of one layer and in a whole private step; the notes
           say 2 to 5 times as fast in some cases

Training steps are those of `gramian profile train`: forward, backward, clip and AdamW, bf16 autocast on a GPU. "busy" is a step
that keeps a GPU at work, "small" one that waits for its kernels to be launched. Private steps are those of `private_step.py`
(forward, backward, clip) in bf16. A CPU measures sizes that are too small to mean anything, so that the script can be tried.
"""

import gc
import statistics
import time
import warnings
from typing import Any

import torch

from benchmarks._timing import ratio, take_turns, write
from benchmarks.clip_kernels import milliseconds
from benchmarks.private_step import ours
from benchmarks.train_step import world_of
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares
from gramian.models.gpt import GPT, GPTConfig
from gramian.train.config.config import parse_config
from gramian.verify.profiles.train_knobs import Variant, profile_knobs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
TURNS = 8 if CUDA else 3
TRAINED: dict[str, dict[str, dict[str, Any]]] = {
    "busy": {"model": {"layers": 12, "width": 768, "heads": 12}, "data": {"length": 1024, "batch": 32}},
    "small": {"model": {"layers": 4, "width": 256, "heads": 4}, "data": {"length": 256, "batch": 8}},
} if CUDA else {"small": {"model": {"layers": 2, "width": 32, "heads": 2}, "data": {"length": 16, "batch": 2}}}  # fmt: skip
RECOMPUTED = {"busy": (1, 4)} if CUDA else {"small": (1, 2)}
"""{training step: numbers of blocks in a recomputed segment}."""
PRIVATE: dict[str, int] = (
    {"layers": 4, "width": 2048, "heads": 16, "vocabulary": 32000}
    if CUDA
    else {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64}
)
CHOSEN = ((64, 256), (16, 1024), (4, 4096), (2, 8192)) if CUDA else ((4, 8), (2, 64))
"""Samples and tokens on both sides of the crossing of the two norm algorithms."""
LAYER = (8192, 2048) if CUDA else (64, 32)
"""Outputs and inputs of the linear layer whose norm is timed alone."""


def against_first(size: str, blocks: int, compiled: bool) -> tuple[Variant, Variant]:
    """A training step eager or with stored activations, and the same compiled or recomputed."""
    config = parse_config(
        {
            "model": TRAINED[size]["model"],
            "data": {**TRAINED[size]["data"], "workers": 0, "limit_bytes": 1_000_000},
            "run": {"device": DEVICE, "deterministic": False},
            "parallel": {"checkpoint_blocks": blocks},
        }
    )
    knob = next(profile_knobs(config, world_of(DEVICE), TURNS, compiled, lambda name: None))
    assert not knob.failure, knob.failure
    first, second = knob.variants
    gc.collect()
    return first, second


def compile_figures() -> dict[str, Any]:
    """How many times as fast a compiled training step is."""
    found = {}
    for size in TRAINED:
        eager, compiled = against_first(size, blocks=0, compiled=True)
        found[size] = {
            "speed_up": 1 / compiled.ratio,
            "memory_over_eager": (compiled.memory or 0) / (eager.memory or 1),
            "milliseconds": {"eager": 1e3 * eager.seconds.median, "compiled": 1e3 * compiled.seconds.median},
        }
    return found


def recompute_figures() -> dict[str, Any]:
    """Share of time that recomputation adds to a training step, and share of its memory that it saves."""
    found: dict[str, Any] = {}
    for size, segments in RECOMPUTED.items():
        for blocks in segments:
            stored, recomputed = against_first(size, blocks, compiled=False)
            found[f"{size}, segments of {blocks}"] = {
                "more_time": recomputed.ratio - 1,
                "memory_saved": 1 - (recomputed.memory or 0) / (stored.memory or 1),
                "milliseconds": {
                    "stored": 1e3 * stored.seconds.median,
                    "recomputed": 1e3 * recomputed.seconds.median,
                },
            }
    return found


def adaptive_figures() -> dict[str, Any]:
    """Time of the worse norm algorithm over the better one of a layer, and of each over "auto" in a private step."""
    found = {}
    for batch, length in CHOSEN:
        left, right = (torch.randn(batch, length, width, device=DEVICE, dtype=DTYPE) for width in LAYER)
        layer = {
            "gram": milliseconds(lambda g=left, a=right: gram_squares(g, a)),
            "direct": milliseconds(lambda g=left, a=right: direct_squares(g, a)),
        }
        config = GPTConfig(context=length, **PRIVATE)
        x = torch.randint(config.vocabulary, (batch, length), device=DEVICE)
        private = {
            name: ours(GPT(config).to(DEVICE, DTYPE), x, norm_algorithm=name) for name in ("auto", "gram", "direct")
        }
        times = take_turns({name: step for name, (step, *_) in private.items()}, TURNS, steps=2, warm_up=2)
        ways = [row.way for row in private["auto"][1].plan.rows]
        found[f"B={batch} T={length}"] = {
            "layer_worse_over_better": max(layer.values()) / min(layer.values()),
            "layer_milliseconds": layer,
            "step_over_auto": {name: ratio(times[name], times["auto"]) for name in ("gram", "direct")},
            "step_milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
            "auto_ways": {way: ways.count(way) for way in sorted(set(ways))},
        }
        del left, right, private
        free()
    return found


def free() -> None:
    """Let models and batches of one shape go before the next."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    """Measure all and write the JSON."""
    warnings.filterwarnings("ignore", message=".*poisson_sampling.*")
    torch.manual_seed(0)
    results: dict[str, Any] = {"private_model": PRIVATE, "trained_models": TRAINED, "layer": LAYER, "seconds": {}}
    for name, measure in (
        ("compile", compile_figures),
        ("recompute", recompute_figures),
        ("adaptive", adaptive_figures),
    ):
        began = time.perf_counter()
        results[name] = measure()
        results["seconds"][name] = time.perf_counter() - began
        free()
        for case, figures in results[name].items():
            print(f"{name}, {case}: {figures}", flush=True)
    print(write("seed_figures" if CUDA else "seed_figures_cpu", results))


if __name__ == "__main__":
    main()
