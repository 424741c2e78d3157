"""The search for K-FAC's recipe as an optimizer, in the open: sketches on the byte problem.

GPT of 6 layers of width 384 on the embedded corpus, 64 × 256 bytes a step, 800 steps, cosine schedule, bf16 autocast. A hidden
layer with momentum M steps along U = P_G^after · N(P_G M P_A) · P_A^after, where P_G = (G/mean + δ)^(−g) and
P_A = (A/mean + δ)^(−a) are powers of K-FAC's averaged factors; N is nothing, Muon's orthogonalisation (Muon itself where both
powers are 0), or Adam's division in the eigenvectors of the factors. Steps have a fixed root mean square; everything else takes
AdamW. Losses only: the sketches are not fast. Needs a GPU. `optimizer_race` has AdamW and Muon on this problem.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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

    lr: float
    a: float = 0.0
    """Power of A: 0, 0.25, 0.5 or 1."""
    g: float = 0.0
    """Power of G."""
    orthogonal: bool = True
    after: bool = False
    """Whether the powers are applied again after N, so that the step is steepest in K-FAC's metric."""
    damping: float = 0.1
    """δ, relative to the mean eigenvalue."""
    basis: bool = False
    """Whether N is Adam's division by the root of the mean squares of the gradient in the eigenvectors of A and G."""
    head: str = ""
    """G of the output layer, "empirical" or "exact" (of the softmax), where it steps as hidden layers do; "": AdamW."""
    tokens: int = 2048
    """Size of the random subset of tokens of a refresh; 0: all."""
    narrow: int = 10**9
    """Width of the widest side to which a power is applied."""
    momentum: float = 0.9
    rest: float = 2e-3
    """Learning rate of everything else."""
    beta2: float = 0.95
    """Of everything else, and of Adam's division."""
    clip: float = 1.0
    """Norm to which the gradients of everything else are clipped."""
    every: int = 20
    """Steps from one refresh to the next."""
    average: float = 0.8
    """Decay of the factors' moving average over refreshes."""
    steps: int = 800
    warmup: int = 40
    seed: int = 0


BEST = Recipe(8e-3, a=0.25, g=0.25, damping=0.1, after=True, narrow=400)
"""The one that `gramian.optim.KFAC` grew from; the wider sides are left out here."""
MUON = Recipe(8e-3)
GRID = [
    # K-FAC's steps: powers −1/2 and −1 of both sides
    *(Recipe(lr, a=0.5, g=0.5, damping=0.003, orthogonal=False) for lr in (1e-3, 2e-3, 4e-3)),
    Recipe(2e-3, a=0.5, g=0.5, damping=0.03, orthogonal=False),
    *(Recipe(lr, a=1.0, g=1.0, damping=0.003, orthogonal=False) for lr in (1e-3, 2e-3)),
    Recipe(2e-3, a=1.0, g=1.0, damping=0.03, orthogonal=False),
    # Adam in the eigenvectors of the factors
    *(Recipe(lr, a=1.0, g=1.0, orthogonal=False, basis=True) for lr in (1e-3, 2e-3, 4e-3)),
    # momentum that is orthogonalised: alone, whitened before, between two powers
    *(replace(MUON, lr=lr) for lr in (4e-3, 8e-3)),
    *(replace(MUON, a=power, g=power) for power in (0.25, 0.5)),
    *(replace(MUON, a=0.25, g=0.25, after=True, damping=damping) for damping in (0.03, 0.1, 0.3)),
    *(replace(MUON, a=a, g=0.25 - a, after=True) for a in (0.0, 0.25)),
    BEST,
    # around the best: the refresh period, tokens, what the head gets, and the rate of everything else
    *(replace(BEST, every=every) for every in (10, 50)),
    *(replace(BEST, tokens=tokens) for tokens in (512, 0)),
    *(replace(BEST, head=head) for head in ("empirical", "exact")),
    *(replace(BEST, rest=rest) for rest in (1e-3, 4e-3)),
    *(replace(recipe, seed=seed) for recipe in (BEST, MUON) for seed in (1, 2)),
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


def eigenvectors(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a stack of matrices, each over its mean eigenvalue."""
    values, vectors = torch.linalg.eigh(matrices / matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None])
    return values, vectors


def inverse_power(matrices: Tensor, power: float, damping: float) -> Tensor:
    """(M/mean + δ)^(−power) of a stack of matrices, by eigenvectors."""
    values, vectors = eigenvectors(matrices)
    return (vectors * (values.clamp(min=0) + damping).pow(-power)[:, None, :]) @ vectors.mT


class Sketch:
    """The step of the hidden layers of one model."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.groups: dict[tuple[int, ...], list[nn.Linear]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and (name.startswith("blocks") or (recipe.head and name == "head")):
                self.groups.setdefault(tuple(module.weight.shape), []).append(module)
        self.mine = {id(layer.weight) for layers in self.groups.values() for layer in layers}
        self.momentum = {s: torch.zeros(len(layers), *s, device="cuda") for s, layers in self.groups.items()}
        self.factors: dict[tuple[Any, ...], Tensor] = {}
        self.roots: dict[tuple[Any, ...], Tensor] = {}
        self.squares: dict[tuple[int, ...], Tensor] = {}
        self.chosen: Tensor | None = None
        for shape, layers in self.groups.items():
            for place, layer in enumerate(layers):
                exact = recipe.head == "exact" and layer is model.get_submodule("head")
                layer.register_forward_hook(self._hook(shape, place, exact))

    def _hook(self, shape: tuple[int, ...], place: int, exact: bool) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.chosen is None or not output.requires_grad:
                return
            chosen, inputs = self.chosen, args[0].detach().flatten(0, 1)[self.chosen].float()
            p_TV = output.detach().flatten(0, 1)[chosen].float().softmax(-1) if exact else None

            def backward(gradient: Tensor) -> None:
                rows = gradient.flatten(0, 1)[chosen].float()
                for side, tokens in (("A", inputs), ("G", rows)):
                    fresh = tokens.mT @ tokens / len(tokens)
                    if p_TV is not None and side == "G":
                        fresh = p_TV.mean(0).diag() - p_TV.mT @ p_TV / len(p_TV)
                    old = self.factors.get((shape, place, side))
                    decay = 0.0 if old is None else self.recipe.average
                    self.factors[shape, place, side] = fresh if old is None else decay * old + (1 - decay) * fresh

            output.register_hook(backward)

        return note

    def before(self, step: int) -> None:
        """Choose tokens if this step refreshes."""
        due = (self.recipe.a or self.recipe.g) and step % self.recipe.every == 0
        tokens = self.recipe.tokens or BATCH * LENGTH
        self.chosen = torch.randperm(BATCH * LENGTH, device="cuda")[:tokens] if due else None

    def step(self, rate: float, decay: float) -> None:
        """Move the hidden weights."""
        recipe = self.recipe
        for shape, layers in self.groups.items():
            if self.chosen is not None:
                for side, power, width in (("A", recipe.a, shape[1]), ("G", recipe.g, shape[0])):
                    if power and width <= recipe.narrow:
                        stack = torch.stack([self.factors[shape, place, side] for place in range(len(layers))])
                        root = eigenvectors(stack)[1] if recipe.basis else inverse_power(stack, power, recipe.damping)
                        self.roots[shape, side] = root
            gradient, momentum = torch.stack([layer.weight.grad for layer in layers]), self.momentum[shape]
            momentum.lerp_(gradient, 1 - recipe.momentum)
            step = gradient.lerp(momentum, recipe.momentum)
            step = self._divided(step, gradient, shape) if recipe.basis else self._whitened(step, shape)
            if recipe.orthogonal:
                step = orthogonalised(step)
            if recipe.after:
                step = self._whitened(step, shape)
            if recipe.orthogonal and not recipe.after:
                step = step * 0.2 * math.sqrt(max(shape))
            else:
                step = step * (0.2 / step.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-12))
            for layer, change in zip(layers, step, strict=True):
                layer.weight.data.mul_(1 - rate * decay).add_(change, alpha=-rate)
        self.chosen = None

    def _divided(self, step: Tensor, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Adam's division in the eigenvectors of the factors."""
        A, G = self.roots[shape, "A"], self.roots[shape, "G"]
        square = (G.mT @ gradient @ A).square()
        self.squares[shape] = self.squares.get(shape, square).lerp(square, 1 - self.recipe.beta2)
        return G @ ((G.mT @ step @ A) / (self.squares[shape].sqrt() + 1e-12)) @ A.mT

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
    """Train one model; returns the recipe with its held-out losses."""
    torch.manual_seed(recipe.seed)
    model = GPT(GPTConfig(vocabulary=257, context=LENGTH, layers=6, width=384, heads=6)).to("cuda")
    sketch = Sketch(model, recipe)
    rest = [p for p in model.parameters() if id(p) not in sketch.mine]
    groups = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.rest, betas=(0.9, recipe.beta2), weight_decay=0.1, fused=True)
    curve, source = {}, batches(training, 1 + recipe.seed)
    for step in range(recipe.steps):
        part = max(0, step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        factor = min((step + 1) / recipe.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * part))
        sketch.before(step)
        loss_of(model, next(source)).backward()
        nn.utils.clip_grad_norm_(rest, recipe.clip)
        for group in adamw.param_groups:
            group["lr"] = recipe.rest * factor
        adamw.step()
        sketch.step(recipe.lr * factor, 0.1)
        model.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            curve[step + 1] = held_out(model, validation)
    return {**asdict(recipe), "loss": curve[recipe.steps], "curve": curve}


def main() -> None:
    """Train the recipes of the grid, or a part of them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the recipes only I, I + N, …")
    parser.add_argument("--name", default="optimizer_recipes", help="write to results/NAME.json")
    options = parser.parse_args()
    windows = load_windows(DataSection(limit_bytes=16_000_000, length=LENGTH))
    streams = [torch.from_numpy(w.stream.read(0, len(w.stream))).to("cuda", torch.int16) for w in windows]
    part, parts = map(int, options.part.split("/"))
    rows = []
    for recipe in GRID[part::parts]:
        rows.append(train(recipe, *streams))
        shown = {k: v for k, v in rows[-1].items() if k != "curve" and v != getattr(BEST, k, None)}
        print(json.dumps(shown), flush=True)
        path = write(options.name, rows)
    print(path)


if __name__ == "__main__":
    main()
