"""Hidden states of models, and what they are: read rightly, or refused by name."""

import dataclasses

import pytest
import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.distill.teacher.language_model import hidden_of, teacher_hash
from tests.distill.teachers import LAYERS, TEACHERS, VOCABULARY, gpt, huggingface

TOKENS_BT = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
families = pytest.mark.parametrize("family", TEACHERS)


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


def test_other_modules_are_refused() -> None:
    with pytest.raises(GramianError, match="^teacher: Linear is not understood; expected"):
        hidden_of(nn.Linear(2, 2), TOKENS_BT)


@pytest.mark.parametrize("family", ["gpt", "goose", "llama"])
@pytest.mark.parametrize("layers", [(LAYERS + 1,), (-1,), (1, 1)])
def test_layers_that_do_not_exist_are_refused(family: str, layers: tuple[int, ...]) -> None:
    with pytest.raises(GramianError, match="^layers: .*expected"):
        hidden_of(TEACHERS[family](), TOKENS_BT, layers=layers)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_documents_are_kept_apart(family: str) -> None:
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]]).expand(2, -1)
    model = TEACHERS[family]().eval()
    together = hidden_of(model, TOKENS_BT, documents_BT)[0]
    alone = torch.cat([hidden_of(model, TOKENS_BT[:, a:b])[0] for a, b in ((0, 3), (3, 7), (7, 9))], dim=1)
    assert torch.allclose(together, alone, atol=1e-6)


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
