"""Hidden states and heads of models: read rightly, proved, or refused by name."""

import dataclasses

import pytest
import torch
from torch import nn

from gramian.distill.teacher import head_of, hidden_of, teacher_hash
from gramian.errors import GramianError
from gramian.models.gpt import GPT
from tests.distill.teachers import LAYERS, TEACHERS, VOCABULARY, gpt, huggingface

TOKENS_BT = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
families = pytest.mark.parametrize("family", TEACHERS)


def own_logits(model: nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    found = model(tokens_BT)
    return found if isinstance(found, torch.Tensor) else found.logits


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
    from transformers import BertConfig, BertLMHeadModel

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


def test_other_modules_are_refused() -> None:
    for call in (head_of, lambda model: hidden_of(model, TOKENS_BT)):
        with pytest.raises(GramianError, match="^teacher: Linear is not understood; expected"):
            call(nn.Linear(2, 2))


def test_a_proof_restores_the_mode_of_the_model() -> None:
    model = gpt(dropout=0.5).train()
    head_of(model)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters())


@families
def test_layers_are_what_enters_and_leaves_the_blocks(family: str) -> None:
    model = TEACHERS[family]()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS]
    blocks, seen = lists[0], {}
    hooks = []
    for place, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(lambda _, x, i=place: seen.__setitem__(i, x[0].detach().clone())))
    with torch.no_grad():
        layers = hidden_of(model, TOKENS_BT, layers=tuple(range(LAYERS)))[1]
    for hook in hooks:
        hook.remove()
    assert list(layers) == list(range(LAYERS))
    for layer, stream_BTD in layers.items():
        assert torch.equal(stream_BTD, seen[layer]), layer


@pytest.mark.parametrize("family", ["gpt", "goose", "gpt2", "llama"])
def test_the_last_block_is_given_before_the_final_norm(family: str) -> None:
    model = TEACHERS[family]()
    norm = {"gpt2": lambda x: model.transformer.ln_f(x), "llama": lambda x: model.model.norm(x)}
    hidden_BTD, layers = hidden_of(model, TOKENS_BT, layers=(LAYERS,))
    assert torch.equal(norm.get(family, lambda x: model.final_norm(x))(layers[LAYERS]), hidden_BTD)
    assert not torch.allclose(layers[LAYERS], hidden_BTD, atol=1e-2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt", "goose", "llama"])
@pytest.mark.parametrize("layers", [(LAYERS + 1,), (-1,), (1, 1)])
def test_layers_that_do_not_exist_are_refused(family: str, layers: tuple[int, ...]) -> None:
    with pytest.raises(GramianError, match="^layers: .*expected"):
        hidden_of(TEACHERS[family](), TOKENS_BT, layers=layers)


def test_documents_are_kept_apart_or_refused() -> None:
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]]).expand(2, -1)
    model = gpt()
    together = hidden_of(model, TOKENS_BT, documents_BT)[0]
    alone = torch.cat([hidden_of(model, TOKENS_BT[:, a:b])[0] for a, b in ((0, 3), (3, 7), (7, 9))], dim=1)
    assert torch.allclose(together, alone, atol=1e-6)
    with pytest.raises(GramianError, match="^data.isolate: LlamaForCausalLM"):
        hidden_of(huggingface("Llama"), TOKENS_BT, documents_BT)


def test_no_keys_and_values_are_kept() -> None:
    model, told = huggingface("Llama"), []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: told.append(kwargs["use_cache"]), with_kwargs=True)
    hidden_of(model, TOKENS_BT)
    assert told == [False]


def test_the_hash_is_of_weights_and_config(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = huggingface("Llama")
    before = teacher_hash(model)
    model.save_pretrained(tmp_path / "elsewhere")
    assert teacher_hash(type(model).from_pretrained(tmp_path / "elsewhere")) == before
    assert teacher_hash(huggingface("Llama")) == before
    assert teacher_hash(huggingface("Llama").bfloat16()) != before
    assert teacher_hash(huggingface("Llama", rms_norm_eps=1e-3)) != before
    for name, _ in huggingface("Llama").named_parameters():
        other = huggingface("Llama")
        with torch.no_grad():
            other.get_parameter(name).view(-1)[-1] += 1e-3
        assert teacher_hash(other) != before, name


def test_the_hash_of_the_reference_model_knows_its_shape() -> None:
    model = gpt()
    other = gpt()
    other.config = dataclasses.replace(other.config, heads=4)  # the same weights, another function
    assert teacher_hash(gpt()) == teacher_hash(model) != teacher_hash(other)
