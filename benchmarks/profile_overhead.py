"""What `GRAMIAN_PROFILE` costs a private step: off, on, and with every timer cut out of the source.

"removed" runs the classes of the private step compiled from their own source without its `with ….time(…)` blocks, so that
nothing of the timers is left: not the call, not the shared empty context. "off again" is a second engine with nothing changed;
what differs there is noise. The step is forward, backward, clip, noise and SGD on few tokens, where the host, not the device,
sets the pace.
"""

import argparse
import ast
import importlib
import inspect
import statistics
import sys
import types
import warnings
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import ratio, take_turns, write
from gramian.models.gpt import GPT, GPTConfig

TIMED = (
    "clipping.gradient_sums", "clipping.clipping_work", "clipping.sample_norms", "clipping.weighted_sums",
    "clipping.clipping_rule", "private_step", "private_model", "engine",
)  # fmt: skip
"""Modules of `gramian.privacy` with timers, or that import one of them, each after those that it imports."""


class WithoutTimers(ast.NodeTransformer):
    """Puts the body of every `with self.stopwatch.time(…)` in its place; counts them."""

    removed = 0

    def visit_With(self, node: ast.With) -> Any:  # noqa: N802
        """One block."""
        self.generic_visit(node)
        items = [item for item in node.items if not self._times(item.context_expr)]
        if len(items) == len(node.items):
            return node
        self.removed += 1
        return ast.With(items=items, body=node.body) if items else node.body

    @staticmethod
    def _times(expression: ast.expr) -> bool:
        return (
            isinstance(expression, ast.Call)
            and isinstance(expression.func, ast.Attribute)
            and expression.func.attr in ("time", "_time")
        )


def engine_without_timers() -> tuple[type[gramian.PrivacyEngine], int]:
    """`PrivacyEngine` with every timer cut out, and how many there were."""
    cut = WithoutTimers()
    bare: dict[str, types.ModuleType] = {}
    for name in (f"gramian.privacy.{short}" for short in TIMED):
        tree = ast.fix_missing_locations(cut.visit(ast.parse(inspect.getsource(importlib.import_module(name)))))
        module = types.ModuleType(f"bare_{name.rpartition('.')[2]}")
        sys.modules[module.__name__] = module  # dataclasses look their module up
        exec(compile(tree, name, "exec"), module.__dict__)
        for key, value in list(vars(module).items()):  # what it imports from an earlier one has no timers either
            origin = bare.get(getattr(value, "__module__", ""))
            if origin is not None and hasattr(origin, key):
                setattr(module, key, getattr(origin, key))
        bare[name] = module
    return bare["gramian.privacy.engine"].PrivacyEngine, cut.removed


def private_step(kind: type[gramian.PrivacyEngine], config: GPTConfig, x: torch.Tensor, profile: bool) -> Any:
    """A whole private step on a fixed batch."""
    torch.manual_seed(0)
    model = GPT(config).to(device=x.device, dtype=torch.bfloat16 if x.is_cuda else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    engine = kind(insecure_reproducible=True, seed=0)
    engine.stopwatch.on = profile
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(torch.zeros(100, 1)), len(x)),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, engine


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*poisson_sampling.*")
    cuda = torch.cuda.is_available()
    torch.set_num_threads(torch.get_num_threads() if cuda else 1)
    config = GPTConfig(vocabulary=512, context=64, layers=8, width=256 if cuda else 64, heads=4)
    x = torch.randint(config.vocabulary, (2, config.context), device="cuda" if cuda else "cpu")
    bare, removed = engine_without_timers()
    made = {
        "off": private_step(gramian.PrivacyEngine, config, x, profile=False),
        "off again": private_step(gramian.PrivacyEngine, config, x, profile=False),
        "removed": private_step(bare, config, x, profile=False),
        "on": private_step(gramian.PrivacyEngine, config, x, profile=True),
    }
    times = take_turns({name: step for name, (step, _) in made.items()}, arguments.rounds, steps=10, warm_up=5)
    assert made["on"][1].stopwatch.entries
    assert not made["off"][1].stopwatch.entries
    results = {
        "timers_removed": removed,
        "milliseconds": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "over_removed": {name: ratio(values, times["removed"]) for name, values in times.items()},
        "spread_of_off_over_off_again": [
            round(one / other, 4) for one, other in zip(times["off"], times["off again"], strict=True)
        ],
    }
    print(results)
    print(write("profile_overhead" if cuda else "profile_overhead_cpu", results))


if __name__ == "__main__":
    main()
