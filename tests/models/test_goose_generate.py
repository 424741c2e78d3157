"""A Goose read token by token is the Goose read at once; text of any length in memory that does not grow."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.models import GPT, Goose, GooseConfig, GPTConfig, generate_text_tokens
from gramian.models import generate as generate_gpt
from gramian.models.goose import generate
from gramian.models.goose.recurrent_generation import PIECE
from tests.models.test_goose import TINY, TWIN, model_of, tokens_BT


@pytest.mark.oracle
@pytest.mark.parametrize("config", [TINY, TWIN], ids=["spikes", "dense"])
def test_steps_give_the_logits_of_the_parallel_forward_at_every_position(config: GooseConfig) -> None:
    model, tokens = model_of(config), tokens_BT(3, 70)  # beyond the context of 12
    logits_BTV, state = model(tokens), None
    for t in range(70):
        logits_BV, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits_BV, logits_BTV[:, t], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cut", [1, 13, 29])
def test_pieces_joined_by_their_state_are_the_whole(cut: int) -> None:
    model, tokens = model_of(TINY), tokens_BT()
    first, state = model.advance(tokens[:, :cut])
    second, _ = model.advance(tokens[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), model.hidden(tokens)[0], rtol=1e-10, atol=1e-10)


def test_the_state_does_not_grow() -> None:
    model, state, sizes = Goose(TINY), None, set()
    for t in range(40):
        _, state = model.step(torch.tensor([t % 17, 3]), state)
        sizes.add(sum(part.untyped_storage().nbytes() for layer in state for part in layer))
    assert sizes == {3 * TINY.layers * 2 * TINY.width * 4}


def test_text_is_what_sampling_from_full_forwards_gives() -> None:
    model, prompt = model_of(TINY), tokens_BT(1, 2 * PIECE + 3)[0]
    found = generate(model, prompt, 20, temperature=0.7, seed=4)
    generator, expected = torch.Generator().manual_seed(4), prompt
    for _ in range(20):
        probabilities_V = (model(expected.unsqueeze(0))[0, -1].float() / 0.7).softmax(-1)
        expected = torch.cat([expected, torch.multinomial(probabilities_V, 1, generator=generator)])
    assert torch.equal(found, expected)


def huggingface() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).train()


MODELS = {
    "gpt": lambda: GPT(GPTConfig(vocabulary=17, context=12, layers=2, width=16, heads=2)),
    "goose": lambda: Goose(TINY),
    "huggingface": huggingface,
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_model_keeps_the_prompt_and_repeats_with_its_seed(kind: str) -> None:
    model, prompt = MODELS[kind](), torch.tensor([1, 2, 3])
    state = torch.get_rng_state()
    text = generate_text_tokens(model, prompt, 15, seed=4)
    assert text.shape == (18,) and text.dtype == torch.int64
    assert torch.equal(text[:3], prompt)
    assert torch.equal(text, generate_text_tokens(model, prompt, 15, seed=4))
    assert not torch.equal(text, generate_text_tokens(model, prompt, 15, seed=5))
    assert torch.equal(generate_text_tokens(model, prompt, 0), prompt)
    assert model.training and torch.equal(state, torch.get_rng_state())


def without_keys_and_values() -> torch.nn.Module:
    """A model whose outputs have no `past_key_values`."""
    from transformers import MambaConfig, MambaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = MambaConfig(vocab_size=17, hidden_size=8, num_hidden_layers=2, state_size=4, time_step_rank=2)
        return MambaForCausalLM(shape)


@pytest.mark.parametrize("build", [huggingface, without_keys_and_values])
def test_a_hugging_face_model_is_sampled_from_its_own_logits(build: Callable[[], torch.nn.Module]) -> None:
    model, prompt = build(), torch.tensor([1, 2, 3])
    generator, expected = torch.Generator().manual_seed(2), prompt
    model.eval()
    for _ in range(10):
        with torch.no_grad():
            probabilities_V = (model(input_ids=expected.unsqueeze(0)).logits[0, -1] / 1.5).softmax(-1)
        expected = torch.cat([expected, torch.multinomial(probabilities_V, 1, generator=generator)])
    assert torch.equal(generate_text_tokens(model, prompt, 10, temperature=1.5, seed=2), expected)


def test_a_gpt_goes_through_its_own_generate() -> None:
    model, prompt = MODELS["gpt"](), torch.tensor([1, 2, 3])
    assert torch.equal(generate_text_tokens(model, prompt, 20, 0.8, 3), generate_gpt(model, prompt, 20, 0.8, 3))


@pytest.mark.parametrize(
    ("kind", "prompt", "length", "temperature", "field"),
    [
        ("goose", torch.tensor([1]), 3, 0.0, "temperature"),
        ("goose", torch.tensor([], dtype=torch.int64), 3, 1.0, "prompt"),
        ("goose", torch.tensor([[1]]), 3, 1.0, "prompt"),
        ("gpt", torch.tensor([1]), -1, 1.0, "length"),
        ("huggingface", torch.tensor([1]), 24, 1.0, "length"),
        ("linear", torch.tensor([1]), 3, 1.0, "model"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(
    kind: str, prompt: Tensor, length: int, temperature: float, field: str
) -> None:
    model = torch.nn.Linear(3, 3) if kind == "linear" else MODELS[kind]()
    with pytest.raises(GramianError, match=f"^{field}: got .*; expected "):
        generate_text_tokens(model, prompt, length, temperature)
