"""A program: a root from a seed, its records, and the loss behind it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.kit.programs import coupled, ordinary, reordered, shared  # noqa: F401  fill the registries
from tests.kit.programs.grammar import (
    LAYERS,
    ORDINARY,
    RETURNS,
    UNUSUAL,
    VOCABULARY,
    Draft,
    Root,
    Step,
    reduced,
    terms,
    unfit,
)
from tests.kit.programs.returns import RAGGED


class Batch(NamedTuple):
    """Arguments of a root, and the targets of the loss behind it."""

    x: Tensor
    """[B, T, D] numbers or [B, T] token ids."""
    inputs: dict[str, Tensor]
    """Keyword arguments."""
    targets: Tensor
    """[B]."""


@dataclass(frozen=True)
class Program:
    """A root and 2·B records: the first B are the batch, the others replace samples of it.

    Attributes:
        seed: of everything that is drawn.
        productions: their names in order, the last one from RETURNS; None: drawn.
        given: sizes and choices that are not drawn, see `Draft`.
    """

    seed: int
    productions: tuple[str, ...] | None = None
    given: tuple[tuple[str, Any], ...] = ()

    def make(self) -> tuple[Draft, Root]:
        """Draw the program; the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            draft = Draft(self.seed, **dict(self.given))
            *names, last = self.productions or _draw(draft, self.seed)
            steps = [_first(draft), *(draft.step(name) for name in names)]
            returns = RETURNS[last](draft)
            if returns is unfit:
                last, returns = "rows", RETURNS["rows"](draft)
            draft.used.append(last)
            # A root with parameters of its own is run again by samples, which a loss of the batch does not allow.
            draft.sample_major &= not (draft.own and draft.returns_scalars)
            return draft, Root(draft, steps, returns)

    @cached_property
    def draft(self) -> Draft:
        """Sizes, choices and inputs."""
        return self.make()[0]

    def root(self, dtype: torch.dtype | None = None) -> Root:
        """A new root with the program's weights, by default in the program's dtype."""
        return self.make()[1].to(dtype or self.draft.dtype)

    @property
    def samples(self) -> int:
        """B."""
        return self.draft.samples

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the productions, once each."""
        return tuple(dict.fromkeys(self.draft.used))

    @property
    def longest(self) -> int:
        """Number of the longest record of the batch."""
        return int(self._records[1][: self.samples].argmax())

    @property
    def is_random(self) -> bool:
        """True if the forward draws random numbers."""
        return self.draft.draws

    @cached_property
    def _records(self) -> tuple[Batch, Tensor]:
        """All records, padded, and their lengths [2·B]; the longest is in the batch."""
        d, generator = self.draft, torch.Generator().manual_seed(self.seed + 1)
        shape = (d.records, d.tokens)
        x = torch.randn(*shape, d.width, generator=generator)
        if d.ids:
            x = torch.randint(VOCABULARY, shape, generator=generator)
            x[:, 0] = torch.arange(d.records) % VOCABULARY  # no batch of equal samples, about which nothing can be said
        targets = torch.randn(d.records, generator=generator)
        lengths = torch.full(shape[:1], d.tokens)
        if not d.ragged:
            return Batch(x, d.inputs, targets), lengths
        lengths = torch.randint(1, d.tokens + 1, shape[:1], generator=generator)
        lengths[int(torch.randint(d.samples, (), generator=generator))] = d.tokens
        real = torch.arange(d.tokens) < lengths[:, None]
        return Batch(x * (real if d.ids else real[..., None]), d.inputs | {"real": real}, targets), lengths

    def batch(self, records: Iterable[int], dtype: torch.dtype | None = None, collate: bool = False) -> Batch:
        """Some records as a batch.

        Args:
            records: their numbers, below 2·B.
            dtype: of what is not an index; None: the program's.
            collate: pad to the longest of these records, as a loader does; False: leave the padding of all records.
        """
        (x, inputs, targets), lengths = self._records
        rows = list(records)
        longest = int(lengths[rows].max()) if collate and rows else x.shape[1]
        inputs = {name: value[rows] for name, value in inputs.items()}
        if "real" in inputs:
            inputs["real"] = inputs["real"][:, :longest]
        chosen = Batch(x[rows, :longest], inputs | self.draft.fixed, targets[rows])
        wanted = dtype or self.draft.dtype
        return pytree.tree_map(lambda t: t.to(wanted) if t.is_floating_point() else t, chosen)

    def forward(self, root: nn.Module, batch: Batch, state: int = 0) -> tuple[Tensor, Tensor]:
        """The terms of the loss behind the row outputs [B], and the sum of the scalars that the root returns.

        Every forward begins with the same random state, the number `state` of the program's.
        """
        torch.default_generator.manual_seed(self.seed + state)
        leaves = pytree.tree_leaves(root(batch.x, **batch.inputs))
        scalars = [leaf for leaf in leaves if not leaf.dim()]
        outputs = [leaf for leaf in leaves if leaf.dim()]
        return terms(outputs, batch.targets), torch.stack([batch.targets.new_zeros(()), *scalars]).sum()

    def loss(self, root: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch: the mean or sum of the terms, and the scalars."""
        terms_B, scalar = self.forward(root, batch)
        return reduced(terms_B, self.draft.reduction) + scalar


def _draw(d: Draft, seed: int) -> list[str]:
    """Names of productions: seeds take turns, so that a few hundred in a row have them all.

    Two programs in five have ordinary productions alone; every second one ends with a layer.
    """
    turn, place = divmod(seed, 5)
    names = [_in_turn(ORDINARY, seed), *d.rng.choices(sorted(ORDINARY), k=d.rng.randint(0, 1))]
    if place < 3:
        names += [_in_turn(UNUSUAL, 3 * turn + place), *d.rng.choices(sorted(UNUSUAL), k=place == 2)]
    names += [d.rng.choice(["dropout", "dropout", "mixed_up"])] * d.random
    d.rng.shuffle(names)
    last_layer = d.rng.choices(LAYERS, k=d.rng.choice([0, 1]))
    returns = RAGGED if d.ragged else sorted(set(RETURNS) - set(RAGGED))
    return [*names, *last_layer, d.rng.choice(returns)]


def _in_turn(productions: Iterable[str], number: int) -> str:
    names = sorted(productions)
    return names[number % len(names)]


def _first(d: Draft) -> Step:
    """Token ids through a table, numbers through a layer."""
    if d.ids:
        table = d.add(nn.Embedding(VOCABULARY, d.width), "tokens")
        return lambda x, run: table(x)
    return d.step("linear")
