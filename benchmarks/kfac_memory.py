"""What K-FAC's plan says against what the allocator gives out, stage by stage: unconstrained, and within a quarter of that.

A GPT of one layer, two refreshes, each followed by a natural gradient. Left out on both sides: model, gradients, what the
forward and backward of the model take by themselves, and the natural gradient that is returned. On a GPU the head has 151,936
classes and a refresh 8,192 tokens; a CPU measures small ones, every request to its allocator counted by the profiler.
"""

import argparse
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import gramian
from benchmarks._timing import write
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Shape:
    """A model and how many tokens a refresh has."""

    vocabulary: int
    width: int
    context: int
    samples: int
    dtype: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        """T."""
        return self.context * self.samples

    def model(self, device: str) -> GPT:
        """One table, one block and a head."""
        torch.manual_seed(0)
        heads = max(1, self.width // 64)
        config = GPTConfig(self.vocabulary, context=self.context, layers=1, width=self.width, heads=heads)
        with torch.device(device):
            return GPT(config).to(self.dtype)


SHAPES = {
    "cpu": {
        "head of 2,000, 256 tokens": Shape(2000, 64, 64, 4),
        "head of 5,000, 512 tokens": Shape(5000, 96, 64, 8),
        "head of 300, 1,024 tokens": Shape(300, 128, 128, 8),
    },
    "cuda": {
        "head of 50,257, 4,096 tokens": Shape(50_257, 768, 1024, 4, torch.bfloat16),
        "head of 151,936, 8,192 tokens": Shape(151_936, 896, 1024, 8, torch.bfloat16),
    },
}


class Stage:
    """Bytes beyond those at its beginning: at the most, and at its end."""

    peak = left = 0


@contextmanager
def stage(device: str) -> Iterator[Stage]:
    """Measure what runs inside."""
    found = Stage()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        torch.cuda.synchronize()
        gc.collect()
        found.peak, found.left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        yield found
        gc.collect()
    events = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    for _, count in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        found.left += count
        found.peak = max(found.peak, found.left)


def planned(shape: Shape, device: str, **options: Any) -> CurvaturePlan:
    """The plan of a refresh, of a model that is nowhere."""
    words = torch.empty(shape.samples, shape.context, dtype=torch.long, device="meta")
    return gramian.KFACNaturalGradient(**options).plan(shape.model("meta"), inputs=words, device=device)


def measure(shape: Shape, device: str, budget: int | None = None, **options: Any) -> dict[str, Any]:
    """Plan, then two refreshes with their use.

    Args:
        shape: of the model.
        device: "cuda" or "cpu".
        budget: memory_budget, bytes.
        options: of K-FAC.

    Returns:
        {"plan": bytes by stage, "measured": the same, "peak": {"plan", "measured", "ratio"}, "table": the plan's text}.
    """
    model = shape.model(device)
    kfac = gramian.KFACNaturalGradient(update_freq=1, memory_budget=budget, **options)
    words = torch.randint(shape.vocabulary, (shape.samples, shape.context + 1), device=device)

    def backward() -> None:
        logits = model(words[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits.float(), words[:, 1:].flatten()).backward()

    backward()  # gradients are there from now on, and what libraries keep for themselves
    model.zero_grad(set_to_none=False)
    plan = kfac.plan(model, inputs=words[:, :-1])
    total = plan.totals[device]
    held = peak = 0
    rounds = []
    for _ in range(2):
        capture = ExitStack()
        with stage(device) as collect:
            capture.enter_context(kfac.capture(model, num_terms=shape.tokens))
            backward()
        with stage(device) as build:
            capture.close()
        with stage(device) as use:
            natural = kfac.compute_natural_gradient(model)
            returned = sum(t.nbytes for t in natural.values())
            del natural
        peak = max(peak, held + collect.left + build.peak)
        held += collect.left + build.left
        peak = max(peak, held + use.peak - returned)
        held += use.left
        rounds.append({"collect": collect.left, "build": build.peak, "use": use.peak - returned, "held": held})
    planned = {
        "collect": total.collect,
        "build": total.making + total.rest,
        "use": max(total.use, total.factorised + total.apply),
        "held": total.rest + total.factorised,
    }
    return {
        "plan": planned,
        "measured": {"first": rounds[0], "second": rounds[1]},
        "peak": {"plan": total.peak, "measured": peak, "ratio": peak / total.peak},
        "representations": {row.layer: f"{row.representation} ({row.why})" for row in plan.rows},
        "table": str(plan),
    }


def main() -> None:
    """Measure all shapes of the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    results = {}
    for name, shape in SHAPES[device].items():
        free = measure(shape, device)
        quarter = measure(shape, device, budget=free["peak"]["plan"] // 4)
        results[name] = {"unconstrained": free, "quarter": quarter}
        for how, found in results[name].items():
            peak = found["peak"]
            print(f"{name}, {how}: plan {peak['plan'] / 1e6:,.1f} MB, measured {peak['measured'] / 1e6:,.1f} MB")
            print(found.pop("table"))
            for key in ("collect", "build", "use", "held"):
                took = [found["measured"][refresh][key] / 1e6 for refresh in ("first", "second")]
                print(f"  {key}: plan {found['plan'][key] / 1e6:,.1f} MB, measured {took[0]:,.1f}, {took[1]:,.1f} MB")
    print(write("kfac_memory" if device == "cuda" else "kfac_memory_cpu", results))


if __name__ == "__main__":
    main()
