"""A loss that a model returns from labels: a mean over the tokens of a batch couples samples once some tokens do not count."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.taps.hub import hub_of
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.statistics.problems import assert_norms

REMEDY = r"num_items_in_batch=N with loss_reduction=1/N"


class TokenMean(nn.Module):
    """The loss as Hugging Face's causal models return it: a sum over tokens over their number, or over a given one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(
        self, ids: Tensor, labels: Tensor, mask: Tensor | None = None, num_items_in_batch: int | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.table(ids)))
        terms = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        counted = mask.flatten() if mask is not None else labels.flatten() != -100
        return {"loss": (terms * counted).sum() / (num_items_in_batch or counted.sum()), "logits": logits}


def _batch(*ignored: int) -> tuple[Tensor, Tensor]:
    """Ids, and labels of which the first tokens of each sample do not count."""
    ids = torch.randint(1, 9, (len(ignored), 6), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    for row, count in enumerate(ignored):
        labels[row, :count] = -100
    return ids, labels


def _loop(model: nn.Module, ids: Tensor, labels: Tensor, terms: int) -> Tensor:
    """Norms of N times each sample's share, one sample at a time."""
    found = []
    for x, y in zip(ids, labels, strict=True):
        loss = model(x[None], y[None], num_items_in_batch=terms)["loss"]
        gradients = torch.autograd.grad(loss * terms, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(found)


def test_equal_counts_are_exact_and_unequal_ones_of_a_later_batch_are_refused_with_the_remedy() -> None:
    model = TokenMean().double()
    with gramian.per_sample_norms(model) as norms:
        model(*_batch(2, 2, 2, 2))["loss"].backward()
    assert_norms(norms.values, _loop(model, *_batch(2, 2, 2, 2), terms=4) / 4, 1e-9)
    with refusal(REMEDY), gramian.per_sample_norms(model):
        model(*_batch(1, 2, 2, 3))["loss"].backward()


def test_a_constant_number_of_terms_is_exact_at_unequal_counts() -> None:
    model, batch = TokenMean().double(), _batch(0, 2, 5, 3)
    with gramian.per_sample_norms(model, loss_reduction=1 / 24) as norms:
        for labels in (_batch(2, 2, 2, 2)[1], batch[1]):
            model(batch[0], labels, num_items_in_batch=24)["loss"].backward()
    assert_norms(norms.values[4:], _loop(model, *batch, terms=24), 1e-9)


def test_what_is_shown_at_unequal_counts_covers_equal_ones() -> None:
    model, (ids, labels) = TokenMean(), _batch(0, 2, 5, 3)
    with gramian.per_sample_norms(model, loss_reduction=1 / 24):
        for these in (labels, _batch(2, 2, 2, 2)[1], labels):
            model(ids, these, num_items_in_batch=24)["loss"].backward()
    assert len(hub_of(model).proof.proven) == 1


def test_a_loss_of_the_logits_is_exact_at_unequal_counts() -> None:
    model, (ids, labels) = TokenMean().double(), _batch(0, 2, 5, 3)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        logits = model(ids, labels)["logits"]
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert_norms(norms.values, _loop(model, ids, labels, terms=1), 1e-9)


def test_a_model_that_returns_nothing_but_its_loss_is_refused_with_the_remedy() -> None:
    class LossAlone(TokenMean):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids, labels)["loss"]

    model = LossAlone()
    with refusal(REMEDY), gramian.per_sample_norms(model):
        model(*_batch(2, 2, 2)).backward()
        model(*_batch(1, 2, 3)).backward()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_of_unequal_counts_in_a_later_batch_is_refused(dtype: torch.dtype) -> None:
    model, (ids, labels) = TokenMean(), _batch(0, 0, 0)
    mask = torch.ones(3, 6, dtype=dtype)
    with refusal(REMEDY), gramian.per_sample_norms(model):
        model(ids, labels, mask)["loss"].backward()
        mask[1, 4:] = 0
        model(ids, labels, mask)["loss"].backward()


def test_private_training_refuses_a_later_batch_of_unequal_counts_before_it_is_used() -> None:
    ids, labels = _batch(*[2] * 8)
    model = TokenMean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gramian.PrivacyEngine()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, labels), batch_size=4)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    model(ids[:4], labels[:4])["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    labels[0, :4] = -100
    with refusal(REMEDY):
        model(ids[:4], labels[:4])["loss"].backward()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    engine.detach()


@pytest.mark.slow
def test_a_model_of_transformers_is_refused_at_unequal_counts_and_exact_with_a_constant_number() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=9, num_key_value_heads=2, **sizes)
    model, (ids, labels) = transformers.LlamaForCausalLM(config), _batch(1, 3, 2, 2)
    with gramian.per_sample_norms(model):
        model(input_ids=ids, labels=_batch(2, 2, 2, 2)[1]).loss.backward()
    with refusal(REMEDY), gramian.per_sample_norms(model):
        model(input_ids=ids, labels=labels).loss.backward()
    with gramian.per_sample_norms(model, loss_reduction=1 / 20) as norms:
        model(input_ids=ids, labels=labels, num_items_in_batch=20).loss.backward()
    assert norms.values.isfinite().all()


def test_a_mask_and_labels_of_one_square_shape_are_not_both_nobodys() -> None:
    def masked(net: Any, x: Tensor, allowed: Tensor, labelled: Tensor) -> dict[str, Tensor]:
        h = net.layer(x)
        h = (h @ h.mT).masked_fill(~allowed, -torch.inf).softmax(-1) @ h
        return {"loss": net.head(h)[..., 0].sin()[labelled].mean()}

    torch.manual_seed(0)
    model, x = Toy(masked, layer=nn.Linear(3, 3), head=nn.Linear(3, 1)), torch.randn(6, 6, 3)
    allowed = torch.ones(6, 6).tril().bool()
    labelled = torch.cat([allowed[:3], allowed[:3].flip(0)])  # a reversed batch has them in the same order
    with refusal("couples samples"), gramian.per_sample_norms(model):
        model(x, allowed, labelled)["loss"].backward()
    with gramian.per_sample_norms(model) as norms:
        model(x, allowed, torch.ones(6, 6).bool())["loss"].backward()
    for i, value in enumerate(norms.values):
        own = torch.autograd.grad(
            model(x[i : i + 1], allowed, torch.ones(1, 6).bool())["loss"], list(model.parameters())
        )
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


class Divided(nn.Module):
    """A batch that is divided by the largest number it is given, or flipped by a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, over: Any = None, mode: Any = 0) -> Tensor:
        h = self.layer(x)
        h = h.flip(0) if mode else h
        return h if over is None else h / torch.as_tensor(over).to(h).max()


GIVEN = {
    "a list": ([2, 2, 2, 2, 2, 2], [1, 2, 3, 1, 2, 3]),
    "an array": (np.full(6, 2), np.array([1, 2, 3, 1, 2, 3])),
    "reals": (torch.full((6,), 2.0), torch.tensor([1.0, 2, 3, 1, 2, 3])),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_numbers_of_samples_that_differ_in_later_batches_only_are_proven_then(kind: str) -> None:
    model, x = Divided(), torch.randn(6, 4)
    even, uneven = GIVEN[kind]
    with gramian.per_sample_norms(model):
        model(x, even).sin().sum(1).mean().backward()
    with refusal("changes when other"), gramian.per_sample_norms(model):
        model(x, uneven).sin().sum(1).mean().backward()


def test_a_number_that_chooses_a_branch_later_is_proven_then() -> None:
    model, x = Divided(), torch.randn(6, 4)
    with gramian.per_sample_norms(model):
        model(x).sin().sum(1).mean().backward()
    with refusal("changes when other"), gramian.per_sample_norms(model):
        model(x, None, 1).sin().sum(1).mean().backward()


def test_labels_that_come_first_are_counted() -> None:
    model, (ids, labels), (_, uneven) = TokenMean(), _batch(0, 0, 0, 0), _batch(0, 1, 2, 3)
    with gramian.per_sample_norms(model):
        model(labels=labels, ids=ids)["loss"].backward()
    with refusal(REMEDY), gramian.per_sample_norms(model):
        model(labels=uneven, ids=ids)["loss"].backward()
