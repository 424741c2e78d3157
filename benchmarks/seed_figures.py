"""Four performance figures of the notes that `docs/how-to/from_the_notes.md` maps, measured here as ratios in one run.

compile    a training step with compile.mode "default" against the eager one; the notes say 1.3 to 1.8 times as fast
recompute  a training step with parallel.checkpoint_blocks against stored activations; the notes say a third more time
release    peak memory of a private step with Tuning(release=False) against the default; the notes say 20 to 40 % less
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks._timing import ratio, take_turns, write
from benchmarks.clip_kernels import milliseconds
from benchmarks.clip_tuning import above_start
from benchmarks.private_step import ours
from benchmarks.train_step import world_of
from gramian.kernels.norms.direct_squares import direct_squares
from gramian.kernels.norms.gram_squares import gram_squares
from gramian.models.gpt import GPT, GPTConfig
from gramian.privacy import Tuning
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
RELEASED = ((2, 1024), (16, 1024)) if CUDA else ((2, 8), (4, 8))
"""Samples and tokens of private steps: few beside the weights, and many."""
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


@dataclass(frozen=True)
class PrivateSteps:
    """{name: a private step with the options of that name}, all on one batch, and their engines and optimizers."""

    steps: dict[str, Callable[[], None]]
    engines: dict[str, Any]
    optimizers: dict[str, Any]

    @classmethod
    def of(cls, batch: int, length: int, options: dict[str, dict[str, Any]]) -> "PrivateSteps":
        """A model of its own for every entry of {name: options of `make_private`}."""
        config = GPTConfig(context=length, **PRIVATE)
        x = torch.randint(config.vocabulary, (batch, length), device=DEVICE)
        made = {name: ours(GPT(config).to(DEVICE, DTYPE), x, **chosen) for name, chosen in options.items()}
        return cls(*({name: parts[place] for name, parts in made.items()} for place in range(3)))

    def times(self) -> dict[str, list[float]]:
        """Seconds of a step in each turn."""
        return take_turns(self.steps, TURNS, steps=2, warm_up=2)

    def memory(self) -> dict[str, float]:
        """GiB that a step needs above its start, where there are no gradients."""
        found = {}
        for name, step in self.steps.items():
            self.optimizers[name].zero_grad()
            found[name] = above_start(step)
        return found


def release_figures() -> dict[str, Any]:
    """Share of a private step's peak above its start that is saved by freeing saved tensors early."""
    off = Tuning(release=False)
    options: dict[str, dict[str, Any]] = {
        "planned": {},
        "planned, not released": {"tuning": off},
        "bookkeeping": {"clipping": "bookkeeping"},
        "bookkeeping, not released": {"clipping": "bookkeeping", "tuning": off},
    }
    found = {}
    for batch, length in RELEASED:
        private = PrivateSteps.of(batch, length, options)
        times, memory = private.times(), private.memory()
        pairs = {mode: f"{mode}, not released" for mode in ("planned", "bookkeeping")}
        found[f"B={batch} T={length}"] = {
            "memory_saved": {mode: 1 - memory[mode] / memory[kept] for mode, kept in pairs.items()},
            "time_over_not_released": {mode: ratio(times[mode], times[kept]) for mode, kept in pairs.items()},
            "gib_above_start": memory,
        }
        del private
        free()
    return found


def adaptive_figures() -> dict[str, Any]:
    """Time of the worse norm algorithm over the better one of a layer, and of each over "auto" in a private step."""
    options = {name: {"norm_algorithm": name} for name in ("auto", "gram", "direct")}
    found = {}
    for batch, length in CHOSEN:
        left, right = (torch.randn(batch, length, width, device=DEVICE, dtype=DTYPE) for width in LAYER)
        layer = {
            "gram": milliseconds(lambda g=left, a=right: gram_squares([g], a)),
            "direct": milliseconds(lambda g=left, a=right: direct_squares(g, a)),
        }
        private = PrivateSteps.of(batch, length, options)
        times = private.times()
        ways = [row.way for row in private.engines["auto"].plan.rows]
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
    """Measure all four and write the JSON."""
    warnings.filterwarnings("ignore", message=".*poisson_sampling.*")
    torch.manual_seed(0)
    results: dict[str, Any] = {"private_model": PRIVATE, "trained_models": TRAINED, "layer": LAYER, "seconds": {}}
    for name, measure in (
        ("compile", compile_figures),
        ("recompute", recompute_figures),
        ("release", release_figures),
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
