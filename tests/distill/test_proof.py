"""What a model shows on a few tokens: its head, that it is causal, its width; or it is refused by name."""

import pytest
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.distill.teacher.head_proof import check_causal, head_of, stream_width
from gramian.distill.teacher.language_model import hidden_of
from gramian.models.gpt import GPT
from tests.distill.teachers import TEACHERS, VOCABULARY, WIDTH, gpt, huggingface
from tests.distill.test_teacher import TOKENS_BT, families


def own_logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    found = model(tokens_BT)
    return found if isinstance(found, Tensor) else found.logits


@families
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_head_of_hidden_is_the_models_logits(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = TEACHERS[family]().to(dtype)
    with torch.no_grad():
        hidden_BTD, _ = hidden_of(model, TOKENS_BT)
        own_BTV = own_logits(model, TOKENS_BT)
        found_BTV = head_of(model).logits(hidden_BTD)
    assert own_BTV.std() > 0.05
    assert (found_BTV - own_BTV).abs().max() <= tolerance * own_BTV.abs().max()


@pytest.mark.parametrize(
    ("family", "bias", "scale", "softcap"),
    [
        ("gpt", False, 1.0, None),
        ("phi, with a bias", True, 1.0, None),
        ("gemma2, capped", False, 1.0, 5.0),
        ("cohere, scaled", False, 0.25, None),
        ("granite, divided", False, 0.125, None),
        ("hyperclovax, multiplied", False, 0.5, None),
    ],
)
def test_a_head_says_what_it_does(family: str, bias: bool, scale: float, softcap: float | None) -> None:
    head = head_of(TEACHERS[family]())
    assert (head.bias_V is not None, head.scale, head.softcap) == (bias, scale, softcap)


class Secretive(GPT):
    """Does something to its logits that no config tells."""

    def forward(self, tokens_BT, documents_BT=None):  # type: ignore[no-untyped-def]
        logits_BTV = super().forward(tokens_BT, documents_BT)
        return self.secret(logits_BTV)


@pytest.mark.parametrize(
    "secret",
    [
        lambda z: z * 1.01,
        lambda z: z + torch.arange(VOCABULARY) * 0.01,
        lambda z: z + torch.arange(VOCABULARY) % 2 * 0.003,  # lost among large logits
        lambda z: 200 * (z / 200).tanh(),  # changes logits of a few nats by less than float32 shows
        lambda z: z.clamp(max=40.0),
    ],
    ids=["scaled", "shifted", "shifted a little", "capped far out", "clamped far out"],
)
def test_a_head_that_is_not_understood_is_refused_by_the_class_of_its_model(secret) -> None:  # type: ignore[no-untyped-def]
    model = Secretive(gpt().config)
    with torch.no_grad():
        model.head.weight *= 0.1  # logits far below any cap
    model.secret = lambda z: z
    head_of(model)
    model.secret = secret
    with pytest.raises(GramianError, match="^teacher: the head of Secretive is not understood.*expected"):
        head_of(model)


def test_hidden_states_that_are_scaled_on_the_way_to_the_head_are_refused() -> None:
    model = huggingface("Llama")
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0.5,))
    with pytest.raises(GramianError, match="LlamaForCausalLM is not understood"):
        head_of(model)


def test_a_transformed_head_is_refused() -> None:
    from transformers import BertConfig, BertLMHeadModel, ElectraConfig, ElectraForCausalLM

    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        is_decoder=True,
    )
    with pytest.raises(GramianError, match="BertLMHeadModel is not understood"):
        head_of(BertLMHeadModel(shape))
    narrow = ElectraConfig(**{**shape.to_diff_dict(), "embedding_size": 4})  # the head reads what is narrower
    with pytest.raises(GramianError, match="ElectraForCausalLM is not understood"):
        head_of(ElectraForCausalLM(narrow))


def test_other_modules_are_refused() -> None:
    with pytest.raises(GramianError, match="^teacher: Linear is not understood; expected"):
        head_of(nn.Linear(2, 2))


def test_a_proof_restores_the_mode_of_the_model() -> None:
    model = gpt(dropout=0.5).train()
    head_of(model)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters())


def test_weights_that_are_not_finite_are_told_as_such() -> None:
    model = gpt()
    with torch.no_grad():
        model.final_norm.weight[0] = torch.nan
    with pytest.raises(GramianError, match="^teacher: logits of GPT are not finite"):
        head_of(model)


def test_a_compiled_model_is_not_compiled_for_the_proof() -> None:
    from torch._dynamo.testing import CompileCounter

    counter, model = CompileCounter(), gpt()
    model.hidden = torch.compile(model.hidden, backend=counter)
    head_of(model)
    check_causal(model)
    stream_width(model, (1,))
    assert counter.frame_count == 0
    model.hidden(TOKENS_BT, None, ())
    assert counter.frame_count == 1


@families
def test_causal_models_pass(family: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        check_causal(TEACHERS[family]().to(dtype))


class Foresighted(GPT):
    """A little of the next token reaches every hidden state."""

    def hidden(self, tokens_BT, documents_BT=None, layers=()):  # type: ignore[no-untyped-def]
        hidden_BTD, streams = super().hidden(tokens_BT, documents_BT, layers)
        return hidden_BTD + 0.01 * hidden_BTD.roll(-1, dims=1), streams


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    shape = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1)
    torch.manual_seed(0)  # weights so small that nothing would be seen are possible
    more = dict(encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=VOCABULARY, max_position_embeddings=16)
    for model in (Foresighted(gpt().config), BartForConditionalGeneration(BartConfig(**shape, **more))):
        head_of(model)
        with pytest.raises(GramianError, match=f"^teacher: {type(model).__name__} sees tokens that come later"):
            check_causal(model)


def projected() -> nn.Module:
    """A residual stream of 16 channels whose head reads 8."""
    return huggingface("OPT", word_embed_proj_dim=8, ffn_dim=16, do_layer_norm_before=False)


def test_the_width_is_that_of_the_stream_and_not_of_what_the_head_reads() -> None:
    assert stream_width(gpt(), (0, 1)) == WIDTH
    model = projected()
    assert head_of(model).weight_VD.shape[1] == 8 != stream_width(model, (0, 3)) == 16
