"""Properties of the reference GPT."""

import pytest
import torch

from gramian.core.errors import GramianError
from gramian.models import GPT, GPTConfig, generate

TINY = GPTConfig(vocabulary=17, context=12, layers=2, width=16, heads=2)


def tokens_BT(batch: int = 3, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(TINY.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 12), (5, 7)])
def test_logits_have_shape_batch_time_vocabulary(batch: int, length: int) -> None:
    assert GPT(TINY)(tokens_BT(batch, length)).shape == (batch, length, TINY.vocabulary)


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_token_changes_no_logits_before_it(changed: int) -> None:
    model = GPT(TINY).double()
    before = tokens_BT()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % TINY.vocabulary
    difference_BT = (model(before) - model(after)).abs().amax(dim=-1)
    assert difference_BT[:, :changed].eq(0).all()
    assert difference_BT[:, changed:].gt(0).all()


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    model = GPT(TINY).double()
    tokens = tokens_BT()
    alone = torch.cat([model(row.unsqueeze(0)) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-12, atol=1e-12)


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = GPT(TINY, seed=1), GPT(TINY, seed=1), GPT(TINY, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


def test_residual_writers_start_smaller_by_the_root_of_twice_the_depth() -> None:
    model = GPT(GPTConfig(layers=8, width=256))
    block = model.blocks[3]
    assert block.fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.attention_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.qkv.bias.eq(0).all()
    assert block.norm_mlp.weight.eq(1).all()


def test_tied_head_is_the_embedding_and_counts_once() -> None:
    tied = GPT(GPTConfig(vocabulary=17, context=12, layers=2, width=16, heads=2, tied=True))
    assert tied.head.weight is tied.token_embedding.weight
    assert GPT(TINY).num_parameters() - tied.num_parameters() == TINY.vocabulary * TINY.width


def test_number_of_parameters_follows_from_the_shape() -> None:
    width = TINY.width
    block = 12 * width**2 + 13 * width
    expected = 2 * TINY.vocabulary * width + TINY.context * width + TINY.layers * block + 2 * width
    assert GPT(TINY).num_parameters() == expected


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTConfig(vocabulary=17, context=12, layers=2, width=16, heads=2, dropout=0.5))
    tokens = tokens_BT()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_compiles_to_one_graph_with_equal_logits_and_gradients() -> None:
    model = GPT(TINY).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = tokens_BT()
    model(tokens).square().sum().backward()
    eager = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = compiled(tokens)
    torch.testing.assert_close(logits, model(tokens), rtol=1e-12, atol=1e-12)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-10, atol=1e-12)


def test_generate_keeps_the_prompt_passes_the_context_and_repeats_with_its_seed() -> None:
    model = GPT(TINY)
    prompt = torch.tensor([1, 2, 3])
    text = generate(model, prompt, 15, seed=4)
    assert text.shape == (18,)
    assert torch.equal(text[:3], prompt)
    assert torch.equal(text, generate(model, prompt, 15, seed=4))
    assert not torch.equal(text, generate(model, prompt, 15, seed=5))
    assert model.training


@pytest.mark.parametrize(
    ("field", "value"), [("vocabulary", 0), ("layers", 0), ("width", 18), ("heads", 0), ("dropout", 1.0)]
)
def test_a_shape_that_cannot_be_built_is_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(GramianError, match=f"^{field}: .*expected"):
        GPTConfig(**{field: value})  # type: ignore[arg-type]


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(GramianError, match="expected at most context"):
        GPT(TINY)(torch.zeros(1, 13, dtype=torch.long))


def test_isolated_documents_are_computed_as_if_each_stood_alone() -> None:
    model = GPT(GPTConfig(context=12, width=16, heads=2, layers=2)).double()
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
    logits = model(tokens, documents)
    for row, (start, stop) in [(0, (0, 5)), (0, (5, 9)), (0, (9, 12)), (1, (0, 12))]:
        alone = model(tokens[row : row + 1, start:stop])
        torch.testing.assert_close(logits[row : row + 1, start:stop], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_recomputed_segments_change_no_gradient(size: int) -> None:
    def gradients(blocks: int) -> list[torch.Tensor]:
        model = GPT(GPTConfig(context=8, width=16, heads=2, layers=3, dropout=0.1)).double()
        model.checkpoint_blocks = blocks
        torch.manual_seed(1)
        model(torch.arange(16).view(2, 8)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for found, expected in zip(gradients(size), gradients(0), strict=True):
        assert torch.equal(found, expected)


def test_generation_restores_the_mode_of_every_module() -> None:
    model = GPT(GPTConfig(vocabulary=8, layers=1, width=8, heads=2, context=8)).train()
    frozen = model.blocks[0].eval()
    generate(model, torch.tensor([1]), 2)
    assert model.training and not frozen.training
