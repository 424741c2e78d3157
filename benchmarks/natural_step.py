"""Is the natural step worth it? SGD, SGD on natural gradients (default options) and AdamW on two problems, by steps and time.

Problems: a teacher-student classification whose inputs have a covariance with condition number 10⁴, and the reference GPT on
the embedded corpus. Every optimizer gets the best of its own grid of learning rates; the rest is default. Draws
benchmarks/figures/natural_step.png if matplotlib is there.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from benchmarks._timing import RESULTS, synchronize, write
from gramian.data.embedded_corpus import load_corpus
from gramian.models.gpt import GPT, GPTConfig

GRIDS = {
    "SGD": (0.03, 0.1, 0.3, 1.0),
    "natural": (0.03, 0.1, 0.3),
    "AdamW": (1e-3, 3e-3, 1e-2, 3e-2),
}


class Problem:
    """A model, an endless stream of batches, and a held-out loss."""

    title = "ill-conditioned classification"

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def held_out(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class IllConditioned(Problem):
    """A two-layer student of a two-layer teacher; inputs have standard deviations from 1 down to 0.01
    along axes that are not the coordinates' (along coordinates a diagonal method would do).

    Every batch is drawn anew, so the held-out loss measures optimisation and nothing else.
    """

    def __init__(self, device: str, small: bool) -> None:
        super().__init__(device, small)
        torch.manual_seed(0)
        self._teacher = nn.Sequential(nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, 10))
        self._rotation = torch.linalg.qr(torch.randn(100, 100))[0]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, 10)).to(self.device)

    def _draw(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scales = torch.logspace(0, -2, 100)
        z = torch.randn(count, 100, generator=generator)
        with torch.no_grad():
            y = self._teacher(3 * z).argmax(-1)
        return (z * scales @ self._rotation).to(self.device), y.to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = 100
        while True:
            step += 1
            yield self._draw(step, 512)

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._draw(3, 2048)


class LanguageModel(Problem):
    """The reference GPT on the embedded corpus."""

    def __init__(self, device: str, small: bool) -> None:
        super().__init__(device, small)
        self.config = GPTConfig(layers=2, width=64, context=64) if small else GPTConfig()
        corpus = load_corpus(2_000_000)
        self.train, self.validation = (
            torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
            for files in (corpus.train, corpus.validation)
        )
        self.batch = 16 if small else 32
        self.title = f"GPT of {self.config.layers} layers, width {self.config.width}, on the embedded corpus"

    def model(self) -> nn.Module:
        return GPT(self.config, seed=0).to(self.device)

    def _windows(self, text: Tensor, seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - self.config.context - 1, (count,), generator=generator)
        rows = torch.stack([text[s : s + self.config.context + 1] for s in starts.tolist()]).long().to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = 0
        while True:
            step += 1
            yield self._windows(self.train, step, self.batch)

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._windows(self.validation, 0, 64)


def train(
    problem: Problem, name: str, lr: float, steps: int, every: int, kl_clip: Any = "default", **settings: Any
) -> dict[str, Any]:
    """Loss on held-out data every few steps, and the seconds spent in steps by then."""
    model = problem.model()
    kfac = None
    if name == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "natural":
        kfac = gramian.KFACNaturalGradient(**settings)
        options = {} if kl_clip == "default" else {"kl_clip": kl_clip}
        gramian.precondition(optimizer, model, kfac, **options)
    held_x, held_y = problem.held_out()
    curve: dict[str, Any] = {"lr": lr, "steps": [], "seconds": [], "loss": []}
    spent = 0.0
    for step, (x, y) in zip(range(1, steps + 1), problem.batches(), strict=False):
        synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        if kfac is None:
            problem.loss(model, x, y).backward()
        else:
            with kfac.capture(model, num_terms=y.numel()):
                problem.loss(model, x, y).backward()
        optimizer.step()
        synchronize()
        spent += time.perf_counter() - start
        if step % every == 0 or step == steps:
            with torch.no_grad():
                loss = float(problem.loss(model, held_x, held_y))
            curve["steps"].append(step)
            curve["seconds"].append(spent)
            curve["loss"].append(loss)
            if not loss < 50:
                break
    return curve


def best(run: Callable[[float], dict[str, Any]], grid: tuple[float, ...]) -> dict[str, Any]:
    """The curve that ends lowest."""
    curves = [run(lr) for lr in grid]
    finished = [c for c in curves if c["loss"] and c["loss"][-1] < 50]
    return min(finished, key=lambda c: c["loss"][-1])


def draw(results: dict[str, Any]) -> None:
    """Curves by steps and by seconds."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    colours = {"SGD": "#9a9a9a", "natural": "#0b6fa4", "AdamW": "#d1812a"}
    figure, axes = plt.subplots(len(results), 2, figsize=(10, 3.6 * len(results)), squeeze=False)
    for row, (problem, curves) in zip(axes, results.items(), strict=True):
        for axis, unit in zip(row, ("steps", "seconds"), strict=True):
            for name, curve in curves.items():
                axis.plot(curve[unit], curve["loss"], label=f"{name}, lr {curve['lr']:g}", color=colours[name], lw=1.8)
            axis.set_xlabel(unit)
            axis.set_ylabel("held-out loss, nats")
            axis.set_title(problem, fontsize=10, loc="left")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path = RESULTS.parent / "figures" / "natural_step.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    print(path)


def main() -> None:
    """Run both problems and write curves and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="a smaller GPT, for a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {}
    for kind in (IllConditioned, LanguageModel):
        problem = kind(device, options.small)
        title = problem.title
        train(problem, "natural", 0.1, 12, 12)  # warm up
        results[title] = {}
        for name, grid in GRIDS.items():
            curve = best(lambda lr, n=name, p=problem: train(p, n, lr, options.steps, 10), grid)
            results[title][name] = curve
            print(
                f"{title}: {name} lr {curve['lr']:g}: {curve['loss'][-1]:.4f} after {curve['seconds'][-1]:.1f} s",
                flush=True,
            )
    print(write("natural_step", results))
    draw(results)


if __name__ == "__main__":
    main()
