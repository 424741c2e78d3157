"""The Fisher of Hugging Face's encoder-decoder models and of models for question answering, against their own losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.curvature.estimate.labelled_batch import logits_of, read_batch
from gramian.curvature.estimate.likelihood import Softmax
from gramian.curvature.operators.loss_terms import read_terms
from gramian.oracles import dense_kfac
from tests.curvature.problems import IGNORE, assert_close, assert_same_factors, classes, has_bias, kfac, seeded
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]
lengths_of_both = pytest.mark.parametrize("lengths", [pytest.param((5, 4), marks=pytest.mark.full), (5, 5)])


def bart(tied: bool = True) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=17, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=12, decoder_ffn_dim=10, max_position_embeddings=20, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, scale_embedding=True, tie_word_embeddings=tied, dropout=0.0,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def t5() -> nn.Module:
    """Its relative attention bias, a table that no sample has rows of, is frozen."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    for name, p in model.named_parameters():
        p.requires_grad_("relative_attention_bias" not in name)
    return model


def answers() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=20,
    )  # fmt: skip
    return BertForQuestionAnswering(config).eval()


def text(source: int = 5, target: int = 4) -> dict[str, Tensor]:
    """Padding on both sides, and a label in the middle that is missing."""
    ids, labels = 3 + classes(14, 3, source), 3 + classes(14, 3, target, seed=4)
    mask = torch.ones_like(ids)
    mask[1, 3:], labels[0, 2:], labels[2, 1] = 0, IGNORE, IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


QUESTION = {
    "input_ids": 3 + classes(14, 3, 5),
    "attention_mask": text()["attention_mask"],
    "start_positions": torch.tensor([0, 1, 2]),
    "end_positions": torch.tensor([2, 1, 4]),
}


def without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: t for name, t in batch.items() if name not in names}


def linear_factors(
    model: nn.Module, backward: Callable[[], Any], mask: Callable[[str], Tensor], terms: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """{linear layer: A and G} from plain hooks, over the tokens where its mask [B, T] is not 0."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[name] = (args[0].detach(), output)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    handles = [module.register_forward_hook(partial(note, name)) for name, module in layers.items()]
    backward()
    for handle in handles:
        handle.remove()
    found = {}
    for name, (a, output) in seen.items():
        keep = mask(name) != 0
        assert output.grad is not None
        rows = dense_kfac.ReferenceTokens(a[keep], output.grad[keep])
        found[name] = dense_kfac.factors(rows, terms, 1.0, has_bias(layers[name]))
    return found


def assert_layers(found: gramian.KFACNaturalGradient, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert expected
    for name, (A, G) in expected.items():
        block = found.kfac_factors[name]
        assert block.A is not None
        assert_close(block.A.to_dense(), A, what=f"{name} A")
        if float(G.norm()) > 1e-12:  # keys of a softmax over one token have none
            assert_close(block.G.to_dense(), G, what=f"{name} G")


def source_or_target(batch: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """The mask of a layer's tokens by its name: keys and values of cross attention are the encoder's."""
    cross = ("encoder_attn.k_proj", "encoder_attn.v_proj", "EncDecAttention.k", "EncDecAttention.v")
    target = (batch["labels"] != IGNORE).long()
    return lambda name: batch["attention_mask"] if "encoder." in name or name.endswith(cross) else target


@pytest.mark.parametrize("build", [bart, pytest.param(t5, marks=pytest.mark.full)])
@pytest.mark.parametrize("lengths", [(5, 4), (5, 5)], ids=["different lengths", "one length"])
def test_factors_of_an_encoder_decoder_model_are_those_of_its_own_loss(
    build: Callable[[], nn.Module], lengths: tuple[int, int]
) -> None:
    model, batch, found = seeded(build), text(*lengths), kfac()
    terms = int((batch["labels"] != IGNORE).sum())
    found.collect_kfac_factors(model, batch)
    expected = linear_factors(model, lambda: (terms * model(**batch).loss).backward(), source_or_target(batch), terms)
    assert_layers(found, expected)
    assert found.head == "lm_head" and not found.record()["padding_counted"]
    assert all(block.facts.terms == terms for block in found.kfac_factors.values())


@lengths_of_both
def test_positions_outside_the_decoder_s_mask_do_not_count(lengths: tuple[int, int]) -> None:
    model, batch, masked, ignored = seeded(bart), text(*lengths), kfac(), kfac()
    batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
    batch["decoder_attention_mask"][1, 3:] = 0
    masked.collect_kfac_factors(model, batch)
    batch["labels"] = batch["labels"].masked_fill(batch["decoder_attention_mask"] == 0, IGNORE)
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(text(*lengths)["labels"])
    ignored.collect_kfac_factors(model, batch)
    assert_same_factors(masked, ignored)
    assert masked.kfac_factors["model.shared"].facts.terms == int((batch["labels"] != IGNORE).sum())


def test_the_labels_of_a_decoder_are_never_shifted() -> None:
    model = seeded(bart)
    model.loss_type = "ForCausalLM"
    assert not read_batch(model, text(), None).shifted


@lengths_of_both
def test_drawn_labels_and_the_exact_head_of_an_encoder_decoder_model(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are drawn at the logits that the model has for its labels; the head is exact there."""
    seen: list[Tensor] = []
    real = Softmax.draw

    def noted(self: Softmax, outputs: Tensor, *how: Any) -> Tensor:
        seen.append(outputs.detach())
        return real(self, outputs, *how)

    monkeypatch.setattr(Softmax, "draw", noted)
    model, batch, found = seeded(lambda: bart(tied=False)), text(*lengths), kfac()
    found.collect_kfac_factors(model, batch, "true")
    counted = batch["labels"] != IGNORE
    logits = model(**batch).logits.detach()
    assert_close(seen[0][:, : lengths[1]][counted], logits[counted])
    G = dense_kfac.softmax_fisher(logits[counted], int(counted.sum()))
    assert_close(found.kfac_factors["lm_head"].G.to_dense(), G)


def test_tables_of_bart_have_exact_per_sample_gradients() -> None:
    """Positions with an offset, and tokens that are scaled."""
    model, batch = seeded(bart), text()
    labels = batch.pop("labels")

    def loss(rows: slice) -> Tensor:
        output = model(**{name: t[rows] for name, t in batch.items()}, decoder_input_ids=labels[rows].clamp(min=1))
        return F.cross_entropy(output.logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")

    norms = []
    for i in range(3):
        model.zero_grad()
        loss(slice(i, i + 1)).backward()
        norms.append(
            torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        )
    model.zero_grad()
    with gramian.per_sample_norms(model, loss_reduction="sum") as found:
        loss(slice(0, 3)).backward()
    assert_close(found.values, torch.stack(norms))


@pytest.mark.parametrize("cut", [False, True])
def test_factors_of_question_answering_are_those_of_two_softmaxes_over_tokens(cut: bool) -> None:
    model, batch, found = seeded(answers), dict(QUESTION), kfac()
    if cut:  # behind the last token: of one sample both, of another the end
        batch |= {"start_positions": torch.tensor([0, 5, 2]), "end_positions": torch.tensor([7, 9, 4])}
    terms, mask = (3, batch["attention_mask"] * torch.tensor([[1], [0], [1]])) if cut else (6, batch["attention_mask"])

    def backward() -> None:
        output = model(**batch)
        if not cut:
            (6 * output.loss).backward()
            return
        both = zip((output.start_logits, output.end_logits), ("start_positions", "end_positions"), strict=True)
        entropy = partial(F.cross_entropy, reduction="sum", ignore_index=5)
        sum(entropy(logits, batch[name].clamp(max=5)) for logits, name in both).backward()

    found.collect_kfac_factors(model, batch)
    assert_layers(found, linear_factors(model, backward, lambda _: mask, terms))
    assert found.kfac_factors["qa_outputs"].facts.terms == terms


def test_a_mask_of_two_tokens_is_not_one_of_start_and_end() -> None:
    found = kfac()
    short = {name: t[:, :2] for name, t in QUESTION.items() if t.dim() > 1}
    short["attention_mask"] = torch.tensor([[1, 1], [1, 0], [1, 1]])
    found.collect_kfac_factors(
        seeded(answers), {**short, "start_positions": classes(2, 3), "end_positions": classes(2, 3)}
    )
    assert found.kfac_factors["qa_outputs"].facts.terms == 6


def test_drawn_answers_are_scored_by_both_softmaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answers are needed in the batch, and none of it are used."""
    drawn: list[Tensor] = []
    real = Softmax.draw
    monkeypatch.setattr(Softmax, "draw", lambda *args: drawn.append(real(*args)) or drawn[-1])
    model, found = seeded(answers), kfac()
    batch = without(QUESTION, "start_positions", "end_positions")
    found.collect_kfac_factors(model, batch, "mc")
    (labels_B2,) = drawn
    assert labels_B2.shape == (3, 2)

    def backward() -> None:
        (6 * model(**batch, start_positions=labels_B2[:, 0], end_positions=labels_B2[:, 1]).loss).backward()

    assert_layers(found, linear_factors(model, backward, lambda _: batch["attention_mask"], 6))


@pytest.mark.parametrize("build, batch", [(bart, text()), (bart, text(5, 5)), (answers, QUESTION)])
def test_operators_have_the_loss_of_these_models(build: Callable[[], nn.Module], batch: dict[str, Tensor]) -> None:
    model = seeded(build)
    terms = read_terms(model, batch, "cross_entropy", None)
    outputs = logits_of(model(*terms.question.args, **terms.question.kwargs))
    assert_close(terms.summed_loss(outputs) / terms.num_terms, model(**batch).loss)


@pytest.mark.parametrize(
    "build, batch, told, message",
    [
        (answers, QUESTION, {"fisher_type": "true"}, "fisher_type: a softmax over tokens is that of no layer"),
        (answers, QUESTION, {"loss": "mse"}, 'loss: is "mse", but start and end positions are classes'),
        (
            answers,
            without(QUESTION, "end_positions"),
            {},
            r"end_positions: expected positions of tokens, integers \[3\]",
        ),
        (answers, {**QUESTION, "start_positions": torch.tensor([0, -1, 2])}, {}, "labels: hold -1; expected classes"),
        (
            bart,
            without(text(), "labels"),
            {"fisher_type": "mc"},
            "model: is an encoder with a decoder; expected labels",
        ),
        (bart, (text()["input_ids"], text()["labels"]), {}, "batch: expected a mapping with input_ids and labels"),
    ],
)
def test_what_these_models_cannot_have_is_refused_by_name(
    build: Callable[[], nn.Module], batch: Any, told: dict[str, Any], message: str
) -> None:
    with refusal(message):
        kfac().collect_kfac_factors(seeded(build), batch, **told)
