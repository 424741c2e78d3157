"""What is not a sum over units is refused, with the row proof on, in one line that says what to do."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import gramian
from gramian.models.gpt import isolated
from gramian.oracles.clipped_sum import clip
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy import packed, test_padding_alone
from tests.privacy.problems import assert_sums, private

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")


def refused(model: nn.Module, message: str, rows: packed.Rows, loss: Any = packed.loss_of, **options: Any) -> None:
    settings = {"loss_reduction": "sum", **options}
    with private(model, 1.0, **settings) as run, refusal(message), run.engine.units(rows.ids):
        run.engine.backward(loss(run.model, rows))


TWO_ROWS = [[0, 1, 2], [3, 4]]


class Unmasked(nn.Module):
    """A GPT that does not see which document a token belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = packed.model_of("gpt")

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        return self.gpt(tokens)


class Places(nn.Module):
    """Tokens by themselves, beside the place of each in its row."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(packed.VOCABULARY, 8), nn.Embedding(packed.LENGTH, 8)
        self.head = nn.Linear(8, packed.VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])[None]
        return self.head(torch.tanh(self.token(tokens) + self.place(places)))


def test_a_missing_document_mask_is_refused_also_in_one_row() -> None:
    message = r"changes when other samples are replaced; expected tokens that depend on those of their own unit"
    refused(Unmasked().double(), message, packed.packed(TWO_ROWS))
    refused(Unmasked().double(), message, packed.packed([[0, 1, 2]]))


def test_a_proof_of_unpacked_rows_does_not_cover_packed_ones() -> None:
    with private(Unmasked().double(), 1.0, loss_reduction="sum") as run:
        packed.summed(run, packed.packed([[0], [1], [3]]))
        with refusal("expected tokens that depend on those of their own unit"):
            packed.summed(run, packed.packed(TWO_ROWS))


def test_positions_that_do_not_begin_anew_with_a_document_are_refused() -> None:
    refused(Places().double(), "changes when units are in other places of their rows", packed.packed(TWO_ROWS))


def test_padding_with_a_gradient_is_refused() -> None:
    rows = packed.packed(TWO_ROWS)
    rows.labels[1, -1] = 3
    message = r"^ids: rows or tokens of no unit \(-1\) have a gradient of norm [\d.]+, which would be left out"
    for clipping in STORAGES:
        refused(packed.model_of("gpt"), message, rows, clipping=clipping)


class WithLabels(nn.Module):
    """A GPT that returns its loss; `shifts`: labels are the tokens, which it shifts itself."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        self.gpt, self.shifts = packed.model_of("gpt"), shifts

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
        logits = self.gpt(tokens, documents)
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("shifts", [False, True])
def test_labels_across_documents_are_refused(shifts: bool) -> None:
    rows, model = packed.packed(TWO_ROWS), WithLabels(shifts)
    if shifts:
        rows.labels = torch.where(rows.ids >= 0, rows.tokens, -100)
        rows.labels[:, 1:][rows.ids[:, 1:] != rows.ids[:, :-1]] = -100
    loss = lambda model, rows: model(rows.tokens, rows.labels, rows.ids)  # noqa: E731
    want = packed.wanted("gpt", 1.0, range(5)).totals
    with private(model, 1.0, loss_reduction="sum") as run:
        with run.engine.units(rows.ids):
            loss(run.model, rows).backward()
        assert_sums(run.gradients(), {f"gpt.{name}": total for name, total in want.items()}, 1e-9)
    places = [(0, 5), (0, 9), (1, 7)] if shifts else [(0, 4), (0, 8), (1, 6)]
    for row, place in places:
        rows.labels[row, place] = rows.tokens[row, place if shifts else place + 1]
    if not shifts:  # fewer than four may be by chance
        rows = packed.Rows(*(torch.cat([t, t]) for t in (rows.tokens, rows.ids, rows.labels)))
        rows.ids[2:] += 10
        rows.ids[rows.ids < 10] = -1
    message = r"^ids: in row 0 token 4 is to predict token 5, which belongs to another unit; expected the label -100"
    refused(model, message, rows, loss)
    with private(model, 1.0, loss_reduction="sum") as run, refusal(message), run.engine.units(rows.ids):
        run.engine.check_independence(lambda model, *batch: model(*batch), (rows.tokens, rows.labels, rows.ids))


def test_check_independence_replaces_units() -> None:
    rows = packed.packed(TWO_ROWS)
    batch = (rows.tokens, rows.ids, rows.labels)

    def loss(model: nn.Module, tokens: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return packed.loss_of(model, packed.Rows(tokens, ids, labels))

    for model, message in (
        (packed.model_of("gpt"), None),
        (Unmasked().double(), "expected tokens that depend on those"),
    ):
        with private(model, 1.0, loss_reduction="sum") as run, run.engine.units(rows.ids):
            if message is None:
                run.engine.check_independence(loss, batch)
                assert run.engine.proof["loss"] == "proven"
                continue
            with refusal(message):
                run.engine.check_independence(loss, batch)


def test_layers_without_tokens_are_refused_by_name() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1]] * 3) + 2 * torch.arange(3)[:, None]
    rows = packed.Rows(torch.randn(3, 5, 4).double(), ids, torch.empty(0))

    def squares(model: nn.Module, rows: packed.Rows) -> Tensor:
        loss: Tensor = model(rows.tokens, rows.ids).square().sum()
        return loss

    pooled = Toy(lambda net, x, _: net.layer(x.mean(1)), layer=nn.Linear(4, 3)).double()
    frames = Toy(lambda net, x, _: net.layer(x.mT).mT, layer=nn.Conv1d(4, 3, 1)).double()
    for proof in ("auto", "off"):
        message = r"layer(\.weight|\.bias)?: ids: the layer sees 1 tokens per row, the ids have 5"
        refused(pooled, message, rows, squares, proof=proof)
        refused(
            frames,
            r"layer(\.weight|\.bias)?: ids: tokens of this layer cannot be told apart",
            rows,
            squares,
            proof=proof,
        )
    goose = packed.model_of("goose")
    refused(
        goose, r"blocks\.0\.mix_\w+(\.share)?: ids: tokens of this layer cannot be told apart", packed.packed(TWO_ROWS)
    )


@pytest.mark.parametrize("masked", [True, False])
def test_padding_to_the_longest_record_that_leaks_into_a_unit_is_refused(masked: bool) -> None:
    data, model = test_padding_alone.records(), test_padding_alone.Pooled(masked, dropout=0.0)
    engine = gramian.PrivacyEngine("rdp")
    loader = DataLoader(data, batch_size=8, collate_fn=test_padding_alone.collate)  # type: ignore[arg-type]
    units = [0, 0, 1, 2, 3, 4, 4, 5]
    _, _, loader = attach(engine, model, loader, unit_of=units, expected_batch=6.0, poisson_sampling=True)
    ids, weights = next(iter(loader))
    expected = nullcontext() if masked else refusal("alone has a gradient.*expected samples that do not depend on each")
    with expected:
        model(ids, weights).square().flatten(1).sum(1).mean().backward()
    engine.detach()


def test_ids_that_do_not_fit_are_refused() -> None:
    rows = packed.packed(TWO_ROWS)
    with private(packed.model_of("gpt"), 1.0, loss_reduction="sum") as run:
        for ids, message in (
            ("users", "expected a tensor of integers"),
            ([[0, 1], [2]], "expected integers, as many in each row"),
            (rows.ids.double(), "expected integers of shape"),
            (rows.ids[None], "expected integers of shape"),
            (rows.ids - 5, "expected at least 0, or -1 for padding, got -6"),
        ):
            with refusal(f"^ids: {message}"):
                run.engine.units(ids).__enter__()
        with refusal(r"^ids: expected integers of shape \[2\] or \[2, T\]"), run.engine.units(torch.arange(3)):
            packed.loss_of(run.model, rows)
    refused(packed.model_of("gpt"), '^loss_reduction: is "mean"', rows, loss_reduction="mean")
    refused(packed.model_of("gpt"), "^ids: are given by token, and max_physical_batch=1", rows, max_physical_batch=1)


def test_a_label_of_ones_own_that_equals_the_next_token_is_taken() -> None:
    rows = packed.packed([[0, 1, 2], [3, 4], [1, 2, 0]])
    ends = [(0, 4), (0, 8), (1, 6), (2, 3), (2, 6)]
    for row, place in ends:
        rows.labels[row, place] = rows.tokens[row, place + 1]
    rows.labels[ends[-1]] = (rows.labels[ends[-1]] + 1) % packed.VOCABULARY
    rows.ids[2:][rows.ids[2:] >= 0] += 10
    with private(WithLabels(False), 1.0, loss_reduction="sum") as run, run.engine.units(rows.ids):
        run.model(rows.tokens, rows.labels, rows.ids).backward()


def test_a_hugging_face_model_is_exact_with_positions_or_a_mask_that_divide_documents_and_refused_without() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> nn.Module:
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(vocab_size=packed.VOCABULARY, num_hidden_layers=1, tie_word_embeddings=True, **shape)
        return LlamaForCausalLM(config).double()

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False, **arguments).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    model, gradients = make(), dict[str, list[Tensor]]()
    for text in packed.documents():
        model.zero_grad()
        loss(model, text[None], torch.cat([text[1:], torch.tensor([-100])])[None]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients.setdefault(name, []).append(p.grad.clone())
    stacked = {name: torch.stack(parts) for name, parts in gradients.items()}
    rows = packed.packed([[0, 1, 2], [3, 4], [5]])
    positions, mask = isolated(rows.ids)
    places = torch.arange(packed.LENGTH).expand(3, -1)
    with private(make(), 5.0, loss_reduction="sum") as run:
        for arguments in ({"position_ids": positions}, {"attention_mask": mask}):
            run.optimizer.zero_grad()
            with run.engine.units(rows.ids):
                loss(run.model, rows.tokens, rows.labels, **arguments).backward()
            assert_sums(run.gradients(), clip(stacked, 5.0).totals, 1e-4)  # its norm layers compute in float32
        with refusal("expected tokens that depend on those of their own unit"), run.engine.units(rows.ids):
            loss(run.model, rows.tokens, rows.labels, position_ids=places, attention_mask=None).backward()
