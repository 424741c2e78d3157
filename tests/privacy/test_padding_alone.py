"""Samples alone: padding that leaks from one sample into another is seen, with dropout and whatever sample hides it."""

from collections import UserDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import gramian
from gramian.core.errors import GramianError
from gramian.taps.hub import hub_of
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy


class Pooled(nn.Module):
    """Tokens, dropout, the mean over a record's tokens, with or without its mask, a head."""

    def __init__(self, masked: bool, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout, self.head = nn.Embedding(11, 6), nn.Dropout(dropout), nn.Linear(6, 3)
        self.masked = masked

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.tokens(ids)))
        real = (ids > 0).to(h)[..., None] if self.masked else torch.ones_like(h[..., :1])
        return self.head((h * real).sum(1) / real.sum(1) * weights[:, None].to(h))


def collate(records: Any) -> tuple[Tensor, Tensor]:
    return pad_sequence([ids for ids, _ in records], batch_first=True), torch.stack([weight for _, weight in records])


def records(hidden: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Eight records of different lengths; so many of the shortest have no weight, which hides what they are."""
    torch.manual_seed(0)
    lengths = [2, 3, 4, 5, 7, 8, 9, 9]
    return [(torch.randint(1, 11, (n,)), torch.tensor(float(i >= hidden))) for i, n in enumerate(lengths)]


def run(model: nn.Module, data: list[tuple[Tensor, Tensor]], arguments: Any = None) -> None:
    engine = gramian.PrivacyEngine()
    _, _, loader = attach(engine, model, DataLoader(data, batch_size=len(data), collate_fn=collate))
    try:
        for ids, weights in loader:
            given = (ids, weights) if arguments is None else arguments(ids)
            model(*given).square().flatten(1).sum(1).mean().backward()
    finally:
        engine.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [0, 2])
def test_padding_that_leaks_is_refused(dropout: float, hidden: int) -> None:
    with refusal(r"alone has a gradient.*expected samples that do not depend on each other"):
        run(Pooled(masked=False, dropout=dropout), records(hidden))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [0, 2])
def test_padding_that_is_masked_is_exact(dropout: float, hidden: int) -> None:
    model = Pooled(masked=True, dropout=dropout)
    run(model, records(hidden))
    assert [proven.alone for proven in hub_of(model).proof.proven.values()] == ["collated"]
    assert model.training and model.dropout.training


def test_modules_run_in_their_own_modes_again_after_a_proof_without_dropout() -> None:
    model = Pooled(masked=True, dropout=0.5)
    model.head.eval()
    run(model, records())
    assert model.training and not model.head.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_padding_that_leaks_is_refused_in_every_precision(dtype: torch.dtype) -> None:
    with refusal("alone has a gradient"):
        run(Pooled(masked=False, dropout=0.0).to(dtype), records())
    run(Pooled(masked=True, dropout=0.0).to(dtype), records())


ARGUMENTS: dict[str, Any] = {
    "with positions": lambda ids: (ids, torch.arange(ids.shape[1]).expand_as(ids)),
    "with lengths": lambda ids: (ids, (ids > 0).sum(1)),
    "with a list of lengths": lambda ids: (ids, (ids > 0).sum(1).tolist()),
}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("made", ARGUMENTS)
def test_what_a_loop_makes_of_a_batch_goes_with_the_sample_alone(made: str, masked: bool) -> None:
    class Derived(Pooled):
        def forward(self, ids: Tensor, *_: Any) -> Tensor:
            return super().forward(ids, torch.ones(len(ids)))

    model = Derived(masked, dropout=0.0)
    try:
        run(model, records(), ARGUMENTS[made])
    except GramianError as error:
        assert not masked and "alone has a gradient" in str(error)
    else:
        assert masked


class Tokens(nn.Module):
    """Logits of every token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids)))


def test_a_shifted_batch_is_found_in_the_loaders() -> None:
    """All but the last token: of a record that is padded, the last one stays, and pooling then depends on who is there."""
    model = Tokens()
    run(model, records(), lambda ids: (ids[:, :-1],))
    assert [proven.alone for proven in hub_of(model).proof.proven.values()] == ["collated"]

    class Shifted(Pooled):
        def forward(self, ids: Tensor, *_: Any) -> Tensor:
            return super().forward(ids, torch.ones(len(ids)))

    with refusal("alone has a gradient"):
        run(Shifted(masked=True, dropout=0.0), records(), lambda ids: (ids[:, :-1],))


def test_a_loss_over_the_padded_length_is_refused() -> None:
    """The mean over [B, T], padding included: the longest record makes all others count less."""

    def loss(model: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
        targets = ids.masked_fill(ids == 0, -100)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none").mean()

    model, engine = Tokens(), gramian.PrivacyEngine()
    _, _, loader = attach(engine, model, DataLoader(records(), batch_size=8, collate_fn=collate))
    for batch in loader:
        with refusal("alone has a gradient"):
            engine.check_independence(loss, batch)
    engine.detach()


class Alone(Pooled):
    """Does not run on one sample, or returns another shape for it."""

    def __init__(self, masked: bool, raises: bool) -> None:
        super().__init__(masked, 0.0)
        self.head, self.raises = nn.Linear(6, 1), raises

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        if self.raises and len(ids) == 1:
            raise ValueError("expected more than one value")
        y = super().forward(ids, weights)
        return y if self.raises else y.squeeze()


def backward(model: nn.Module, data: list[Any], **options: Any) -> gramian.PrivacyEngine:
    engine = gramian.PrivacyEngine()
    _, _, loader = attach(engine, model, DataLoader(data, collate_fn=collate, **options))
    try:
        for ids, weights in loader:
            model(ids, weights).square().mean().backward()
    finally:
        engine.detach()
    return engine


@pytest.mark.parametrize("raises", [False, True])
def test_a_sample_that_does_not_fit_alone_runs_beside_a_copy_of_itself(raises: bool) -> None:
    model = Alone(True, raises)
    backward(model, records(), batch_size=8)
    assert [one.alone for one in hub_of(model).proof.proven.values()] == ["collated, beside a copy of itself"]
    with refusal("alone has a gradient of norm"):
        backward(Alone(False, raises), records(), batch_size=8)


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_comes_with_a_later_batch_is_looked_at(masked: bool) -> None:
    data = records()
    equal = [(torch.ones(3, dtype=torch.long) + i, torch.tensor(1.0)) for i in range(4)]
    with nullcontext() if masked else refusal("alone has a gradient of norm"):
        backward(Pooled(masked, 0.0), equal + data[:4], batch_size=4)


def test_a_loader_of_targets_in_lists_gives_each_sample_its_own() -> None:
    def listed(some: Any) -> tuple[Tensor, list[Any]]:
        return torch.stack([x for x, _ in some]), [target for _, target in some]

    def detector(net: Any, x: Tensor, targets: list[Any]) -> Tensor:
        pairs = zip(net.layer(x), targets, strict=True)
        return torch.stack([(h - target["boxes"]).square().mean() for h, target in pairs])

    torch.manual_seed(0)
    data = [(torch.randn(4), {"boxes": torch.randn(n, 4)}) for n in (4, 8, 1, 4)]
    engine, model = gramian.PrivacyEngine(), Toy(detector, layer=nn.Linear(4, 4))
    _, _, loader = attach(engine, model, DataLoader(data, batch_size=4, collate_fn=listed))
    for x, targets in loader:
        model(x, targets).mean().backward()
    engine.detach()
    assert [one.alone for one in hub_of(model).proof.proven.values()] == ["collated"]


class Batch(UserDict[str, Tensor]):
    """As tokenizers give it."""


@pytest.mark.parametrize("masked", [False, True])
def test_a_dry_run_in_front_of_the_loop_covers_no_batch_of_the_loader(masked: bool) -> None:
    model, engine = Pooled(masked, 0.0), gramian.PrivacyEngine()
    _, _, loader = attach(
        engine,
        model,
        DataLoader(records(), batch_size=8, collate_fn=lambda some: Batch(zip("xw", collate(some), strict=True))),
    )
    model(torch.randint(1, 11, (4, 5)), torch.ones(4))
    assert [one.alone for one in hub_of(model).proof.proven.values()] == ["slice"]
    with nullcontext() if masked else refusal("alone has a gradient of norm"):
        for batch in loader:
            model(batch["x"], batch["w"]).square().mean().backward()
    engine.detach()


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_comes_with_a_later_batch_of_the_same_size_is_looked_at(masked: bool) -> None:
    data = records()
    whole = [(torch.randint(1, 11, (9,)), torch.tensor(1.0)) for _ in range(4)]
    with nullcontext() if masked else refusal("alone has a gradient of norm"):
        backward(Pooled(masked, 0.0), whole + data[4:], batch_size=4)
