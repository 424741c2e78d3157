"""What productions are made of: the registries, the draft that a production draws from, and the root that runs the steps.

Shape legend: B samples, N rows, T tokens, D features.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TABLE = 40
"""Rows of every table of positions: more than T, and more than B, which a transposed program takes for T."""
VOCABULARY = 7

Step = Callable[[Tensor, "Run"], Tensor]
Production = Callable[["Draft"], Step]
Return = Callable[[Tensor, "Run"], Any]

ORDINARY: dict[str, Production] = {}
"""Productions whose rows are sample-major: a capture must be exact."""
UNUSUAL: dict[str, Production] = {}
"""Productions with rows in another order, rows of no sample or coupled samples: a capture must be exact or refuse."""
RETURNS: dict[str, Callable[["Draft"], Return]] = {}
"""What the root returns."""


def ordinary(production: Production) -> Production:
    """Register a production whose rows are sample-major."""
    ORDINARY[production.__name__] = production
    return production


def unusual(production: Production) -> Production:
    """Register a production that a capture may refuse."""
    UNUSUAL[production.__name__] = production
    return production


def returned(make: Callable[["Draft"], Return]) -> Callable[["Draft"], Return]:
    """Register something to return."""
    RETURNS[make.__name__] = make
    return make


@dataclass
class Run:
    """One forward of a root."""

    root: Any
    inputs: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)
    """Auxiliary losses, which the root returns beside its output."""


class Root(nn.Module):
    """The chain of steps."""

    def __init__(self, d: "Draft", steps: list[Step], returns: Return) -> None:
        super().__init__()
        self.layers, self.steps, self.returns = d.layers, steps, returns
        for name, parameter in d.own.items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, **inputs: Tensor) -> Any:
        run, h = Run(self, inputs), x
        for step in self.steps:
            h = step(h, run)
        output = self.returns(h, run)
        return (output, torch.stack(run.losses).sum()) if run.losses else output


class Draft:
    """A program while it is being drawn: sizes, random choices, layers, inputs."""

    def __init__(self, seed: int, **given: Any) -> None:
        """Draw the sizes.

        Args:
            seed: of every choice and number.
            given: sizes and choices that are not drawn.
        """
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        choose = self.rng.choice
        drawn = choose([2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 12] * 3 + [32, 33])
        self.samples: int = given.get("samples", drawn)
        self.tokens: int = given.get("tokens", choose([2, 3, 4, 6, self.samples if self.samples <= 6 else 4]))
        self.width: int = given.get("width", choose([3, 4, 6]))
        self.dtype: torch.dtype = given.get("dtype", choose([torch.float64] * 4 + [torch.float32]))
        self.reduction: str = given.get("reduction", choose(["mean", "sum"]))
        self.ids: bool = given.get("ids", choose([True, False, False]))
        """True: the input is token ids [B, T]."""
        self.random: bool = given.get("random", choose([True] + [False] * 5))
        """True: the forward may draw random numbers."""
        self.ragged: bool = given.get("ragged", choose([True] + [False] * 7))
        """True: records have different lengths and are padded to the longest of their batch."""
        self.layers, self.own = nn.ModuleDict(), dict[str, nn.Parameter]()
        self.shared_linear: nn.Linear | None = None
        self.inputs: dict[str, Tensor] = {}
        """Further arguments with a row per record: [2·B, ...]."""
        self.fixed: dict[str, Tensor] = {}
        """Further arguments that belong to no sample."""
        self.used: list[str] = []
        self.sample_major = True
        self.returns_scalars = False
        self.draws = False
        """True: the forward draws random numbers."""
        self.rounds = False
        """True: a capture may change results by rounding: products with a shared row may run on B equal rows."""
        self.whole = True
        """False inside windows, transposed parts and loops: the root's further arguments do not fit there."""
        self._depth, self._inner = 0, ""

    @property
    def records(self) -> int:
        """2·B: the batch, and as many others to replace its samples by."""
        return 2 * self.samples

    @property
    def allows_scalars(self) -> bool:
        """True if losses may be returned: where a forward is random, the terms of a sum cannot be told apart."""
        return not (self.random or self.ragged)

    def add(self, layer: nn.Module, name: str = "") -> Any:
        """Register a layer of the root under a name that tells its kind."""
        self.layers[f"{name or type(layer).__name__.lower()}{len(self.layers)}"] = layer
        return layer

    def linear(self, outputs: int | None = None) -> Any:
        """A new linear layer, D to D unless another number of outputs is given."""
        return self.add(nn.Linear(self.width, outputs or self.width))

    def key(self) -> int:
        """A seed for a choice that is made while the program runs."""
        return self.rng.randrange(2**31)

    def moving_key(self, order: Callable[[int, int], Tensor]) -> int:
        """A key for which the batch gets another order: one that moves samples in batches of other sizes alone is not seen."""
        keys = iter(self.key, None)
        return next(key for key in keys if not torch.equal(order(self.samples, key), torch.arange(self.samples)))

    def normal(self, *shape: int) -> Tensor:
        """Random numbers that are part of the program."""
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Random numbers between 0 and 1 that are part of the program."""
        return torch.rand(*shape, generator=self.generator)

    def step(self, name: str) -> Step:
        """The step of a production. Where it does not fit, a linear layer stands in its place.

        Args:
            name: of the production; "outer(inner)" also says which part a wrapper has.
        """
        name, _, self._inner = name.removesuffix(")").partition("(")
        self._depth += 1
        made = (ORDINARY | UNUSUAL)[name](self)
        self._depth -= 1
        if made is unfit:
            return self.step("linear")
        self.used.append(name)
        self.sample_major &= name in ORDINARY
        return made

    def part(self, whole: bool = True) -> Step:
        """What a wrapper applies: mostly a layer, sometimes another production.

        Args:
            whole: False where the part sees other rows or tokens than the root does.
        """
        before, self.whole = self.whole, self.whole and whole
        chance = self.rng.random() if self._depth < 3 else 1.0
        names = UNUSUAL if chance < 0.1 else ORDINARY if chance < 0.4 else LAYERS
        made = self.step(self._inner or self.rng.choice(sorted(names)))
        self.whole = before
        return made


LAYERS = ("linear", "layer_norm", "convolution", "group_norm", "unknown_layer", "reused_layer", "flat_tokens")
"""Productions that are one layer."""


def unfit(h: Tensor, run: Run) -> Tensor:
    """Returned by a production that does not fit where it was drawn; never runs."""
    raise AssertionError


def shuffled(rows: int, key: int) -> Tensor:
    """A permutation of the rows, the same one for the same key."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(key))


def size(h: Tensor) -> Tensor:
    """One number per row, without a gradient: [N]."""
    return h.detach().flatten(1).sum(1)


def replaced(h: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """`h` with `values` in the chosen places."""
    out = h.clone()
    out[chosen] = values
    return out


def windows_of(h: Tensor) -> int:
    """Number of windows that the tokens can be cut into."""
    return next((k for k in (2, 3) if h.shape[1] % k == 0), 1)


def reduced(terms_B: Tensor, reduction: str) -> Tensor:
    """Mean or sum over samples."""
    return terms_B.mean() if reduction == "mean" else terms_B.sum()


def terms(outputs: list[Tensor], targets_B: Tensor) -> Tensor:
    """One term per sample, which depends on all of the sample's outputs and its target, not linearly: [B]."""
    total_B = torch.zeros_like(targets_B)
    for output in outputs:
        flat = output.flatten(1) if output.dim() > 1 else output[:, None]
        phase = torch.linspace(0, 5, flat.shape[1]).to(flat)
        total_B = total_B + torch.sin(flat + phase + targets_B[:, None]).sum(1)
    return total_B
