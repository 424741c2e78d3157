"""The search for K-FAC's recipe as an optimizer, in the open: sketches on the byte problem, beside AdamW and Muon.

GPT of 6 layers of width 384 on the embedded corpus, 64 × 256 bytes a step, 800 steps, cosine schedule, bf16 autocast, one seed.
A hidden layer with momentum M steps along U = P_G^after · N(P_G M P_A) · P_A^after, where P_G = (G/mean + δ)^(−g) and
P_A = (A/mean + δ)^(−a) are powers of K-FAC's averaged factors, N is nothing, or Muon's orthogonalisation; the step has a fixed
root mean square. Everything else takes AdamW. Steps and losses only: the sketches are not fast. Needs a GPU.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._timing import write
from gramian.data import load_windows
from gramian.data.options import DataSection
from gramian.models.gpt import GPT, GPTConfig

LENGTH, BATCH = 256, 64


@dataclass(frozen=True)
class Recipe:
    """One candidate; powers of 0 leave a side out."""

    kind: str = "kfac"
    """"adamw", "muon" (torch's), or "kfac"."""
    lr: float = 4e-3
    a: float = 0.0
    """Power of A: 0, 0.25, 0.5 or 1."""
    g: float = 0.0
    """Power of G."""
    orthogonal: bool = True
    after: bool = False
    """Whether the powers are applied again after N, so that the step is steepest in K-FAC's metric."""
    damping: float = 0.1
    """δ, relative to the mean eigenvalue."""
    narrow: int = 10**9
    """Width of the widest side to which a power is applied."""
    normed: float = 0.0
    """Decay of each row's mean square after N, by whose root it is divided; 0: rows stay as they are."""
    momentum: float = 0.95
    rest: float = 1.0
    """Learning rate of everything else over `lr`."""
    beta2: float = 0.95
    """Of everything else."""
    clip: float = 0.0
    """Norm to which the gradients of everything else are clipped; 0: none."""
    every: int = 20
    """Steps from one refresh to the next."""
    average: float = 0.8
    """Decay of the factors' moving average over refreshes."""
    steps: int = 800
    warmup: int = 40
    seed: int = 0


def _kfac(a: float, g: float, lr: float, damping: float, **more: Any) -> Recipe:
    return Recipe(lr=lr, a=a, g=g, damping=damping, after=True, momentum=0.9, rest=2e-3 / lr, clip=1.0, **more)


GRID = [
    *(Recipe("adamw", lr=lr, beta2=0.99, clip=1.0) for lr in (1e-3, 1.4e-3, 2e-3)),
    *(Recipe("muon", lr=lr) for lr in (4e-3, 8e-3)),
    *(Recipe(lr=lr, momentum=0.9, rest=2e-3 / lr, clip=1.0) for lr in (4e-3, 8e-3)),
    *(_kfac(0.25, 0.25, 8e-3, damping) for damping in (0.03, 0.1, 0.3)),
    *(_kfac(*powers, 8e-3, 0.03) for powers in ((0.0, 0.25), (0.25, 0.0))),
    _kfac(0.0, 0.5, 8e-3, 0.1),
    Recipe(lr=2e-3, a=0.5, g=0.5, orthogonal=False, damping=0.003, momentum=0.9, clip=1.0, every=10, average=0.9),
]


def orthogonalised(x: Tensor) -> Tensor:
    """Muon's quintic iteration on a stack of matrices: singular values near 1."""
    x = x.bfloat16()
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if turned else x).float()


def inverse_power(matrices: Tensor, power: float, damping: float) -> Tensor:
    """(M/mean + δ)^(−power) of a stack of matrices, by eigenvectors."""
    values, vectors = torch.linalg.eigh(matrices / matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None])
    return (vectors * (values.clamp(min=0) + damping).pow(-power)[:, None, :]) @ vectors.mT


class Sketch:
    """The step of the hidden layers of one model."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.groups: dict[tuple[int, ...], list[nn.Linear]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.startswith("blocks"):
                self.groups.setdefault(tuple(module.weight.shape), []).append(module)
        self.mine = {id(layer.weight) for layers in self.groups.values() for layer in layers}
        self.momentum = {s: torch.zeros(len(layers), *s, device="cuda") for s, layers in self.groups.items()}
        self.factors: dict[tuple[Any, ...], Tensor] = {}
        self.roots: dict[tuple[Any, ...], Tensor] = {}
        self.squares: dict[tuple[int, ...], Tensor] = {}
        self.chosen: Tensor | None = None
        for shape, layers in self.groups.items():
            for place, layer in enumerate(layers):
                layer.register_forward_hook(self._hook(shape, place))

    def _hook(self, shape: tuple[int, ...], place: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.chosen is None or not output.requires_grad:
                return
            chosen, inputs = self.chosen, args[0].detach().flatten(0, 1)[self.chosen].float()

            def backward(gradient: Tensor) -> None:
                rows = gradient.flatten(0, 1)[chosen].float()
                for side, tokens in (("A", inputs), ("G", rows)):
                    fresh = tokens.mT @ tokens / len(tokens)
                    old = self.factors.get((shape, place, side))
                    decay = 0.0 if old is None else self.recipe.average
                    self.factors[shape, place, side] = fresh if old is None else decay * old + (1 - decay) * fresh

            output.register_hook(backward)

        return note

    def before(self, step: int) -> None:
        """Choose tokens if this step refreshes."""
        due = (self.recipe.a or self.recipe.g) and step % self.recipe.every == 0
        self.chosen = torch.randperm(BATCH * LENGTH, device="cuda")[:2048] if due else None

    def step(self, rate: float, decay: float) -> None:
        """Move the hidden weights."""
        recipe = self.recipe
        for shape, layers in self.groups.items():
            if self.chosen is not None:
                for side, power, width in (("A", recipe.a, shape[1]), ("G", recipe.g, shape[0])):
                    if power and width <= recipe.narrow:
                        stack = torch.stack([self.factors[shape, place, side] for place in range(len(layers))])
                        self.roots[shape, side] = inverse_power(stack, power, recipe.damping)
            gradient, momentum = torch.stack([layer.weight.grad for layer in layers]), self.momentum[shape]
            momentum.lerp_(gradient, 1 - recipe.momentum)
            step = self._whitened(gradient.lerp(momentum, recipe.momentum), shape)
            if recipe.orthogonal:
                step = orthogonalised(step)
            if recipe.after:
                step = self._whitened(step, shape)
            if recipe.normed:
                squares = step.square().mean(-1, keepdim=True)
                self.squares[shape] = squares.lerp(self.squares.get(shape, squares), recipe.normed)
                step = step / self.squares[shape].sqrt().clamp(min=1e-12)
            if recipe.orthogonal and not recipe.after and not recipe.normed:
                step = step * 0.2 * math.sqrt(max(shape))
            else:
                step = step * (0.2 / step.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-12))
            for layer, change in zip(layers, step, strict=True):
                layer.weight.data.mul_(1 - rate * decay).add_(change, alpha=-rate)
        self.chosen = None

    def _whitened(self, step: Tensor, shape: tuple[int, ...]) -> Tensor:
        step = step @ self.roots[shape, "A"] if (shape, "A") in self.roots else step
        return self.roots[shape, "G"] @ step if (shape, "G") in self.roots else step


def batches(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless random windows [B, T + 1] of a token stream."""
    generator, places = torch.Generator().manual_seed(seed), torch.arange(LENGTH + 1, device="cuda")
    while True:
        begins = torch.randint(len(stream) - LENGTH - 1, (BATCH,), generator=generator).to("cuda")
        yield stream[begins[:, None] + places].long()


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, stream: Tensor) -> float:
    """Mean loss over the first 512 windows of the validation stream."""
    begins = torch.arange(0, 512 * LENGTH, LENGTH, device="cuda")[:, None] + torch.arange(LENGTH + 1, device="cuda")
    return sum(float(loss_of(model, stream[part].long())) for part in begins.split(128)) / 4


def train(recipe: Recipe, training: Tensor, validation: Tensor) -> dict[str, Any]:
    """Train one model; returns the recipe with its held-out losses and seconds."""
    torch.manual_seed(recipe.seed)
    model = GPT(GPTConfig(vocabulary=257, context=LENGTH, layers=6, width=384, heads=6)).to("cuda")
    sketch = Sketch(model, recipe) if recipe.kind == "kfac" else None
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
    taken = {id(p) for p in hidden} if recipe.kind != "adamw" else set()
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0},
    ]
    rate = recipe.lr * (recipe.rest if recipe.kind != "adamw" else 1)
    optimizers = [torch.optim.AdamW(groups, lr=rate, betas=(0.9, recipe.beta2), weight_decay=0.1, fused=True)]
    if recipe.kind == "muon":
        muon: Any = torch.optim.Muon(hidden, lr=recipe.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    first = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    curve, begun, source = {}, time.perf_counter(), batches(training, 1 + recipe.seed)
    for step in range(recipe.steps):
        part = max(0, step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        factor = min((step + 1) / recipe.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * part))
        if sketch is not None:
            sketch.before(step)
        loss_of(model, next(source)).backward()
        if recipe.clip:
            nn.utils.clip_grad_norm_(rest, recipe.clip)
        for optimizer, rates in zip(optimizers, first, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
        if sketch is not None:
            sketch.step(recipe.lr * factor, 0.1)
        model.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            curve[step + 1] = held_out(model, validation)
    seconds = time.perf_counter() - begun
    return {**asdict(recipe), "loss": curve[recipe.steps], "curve": curve, "seconds": seconds}


def main() -> None:
    """Train every recipe of the grid and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    windows = load_windows(DataSection(limit_bytes=16_000_000, length=LENGTH))
    streams = [torch.from_numpy(w.stream.read(0, len(w.stream))).to("cuda", torch.int16) for w in windows]
    rows = []
    for recipe in GRID:
        rows.append(train(recipe, *streams))
        shown = {k: v for k, v in rows[-1].items() if k != "curve" and v != getattr(Recipe(), k, None)}
        print(json.dumps(shown), flush=True)
        path = write("optimizer_recipes", rows)
    print(path)


if __name__ == "__main__":
    main()
