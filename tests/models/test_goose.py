"""Properties of Goose and its dense twin: what it may see, how it starts, how it is run."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.core.errors import GramianError
from gramian.models import GPT, Goose, GooseConfig, GPTConfig
from gramian.models.goose import layer_operations, operations
from gramian.models.goose.goose_layers import LeakyMemory, Mix, SpikingLinear
from gramian.models.goose.spike import Spike
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.config.config_sections import OptimizerSection
from tests.kit.matrix import sample

TINY = GooseConfig(vocabulary=17, context=12, layers=3, width=16)
TWIN = GooseConfig(vocabulary=17, context=12, layers=3, width=16, spikes=False)
BOTH = pytest.mark.parametrize("config", [TINY, TWIN], ids=["spikes", "dense"])


def tokens_BT(batch: int = 3, length: int = 30, seed: int = 0, vocabulary: int = TINY.vocabulary) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def model_of(config: GooseConfig) -> Goose:
    """In float64, off its initial point: differences that an initial value hides are seen."""
    model, generator = Goose(config).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += (0.3 if p.dim() == 2 else 0.1) * torch.randn(p.shape, generator=generator)
    return model


@BOTH
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 12), (2, 50)])
def test_logits_have_shape_batch_time_vocabulary_beyond_the_context_too(
    config: GooseConfig, batch: int, length: int
) -> None:
    assert Goose(config)(tokens_BT(batch, length)).shape == (batch, length, config.vocabulary)


@BOTH
@pytest.mark.parametrize("changed", [0, 5, 17, 29])
def test_a_token_changes_no_logits_before_it(config: GooseConfig, changed: int) -> None:
    model, before = model_of(config), tokens_BT()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % config.vocabulary
    difference_BT = (model(before) - model(after)).abs().amax(dim=-1)
    assert difference_BT[:, :changed].eq(0).all()
    assert difference_BT[:, changed].gt(0).all()
    assert difference_BT[:, changed:].sum() > 0


@BOTH
def test_samples_of_a_batch_do_not_see_each_other(config: GooseConfig) -> None:
    model, tokens = model_of(config), tokens_BT()
    alone = torch.cat([model(row.unsqueeze(0)) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-12, atol=1e-12)


@BOTH
def test_isolated_documents_are_computed_as_if_each_stood_alone(config: GooseConfig) -> None:
    model, tokens = model_of(config), tokens_BT(2)
    documents = torch.tensor([[0] * 11 + [1] * 1 + [2] * 18, [4] * 30])
    logits = model(tokens, documents)
    for row, (start, stop) in [(0, (0, 11)), (0, (11, 12)), (0, (12, 30)), (1, (0, 30))]:
        alone = model(tokens[row : row + 1, start:stop])
        torch.testing.assert_close(logits[row : row + 1, start:stop], alone, rtol=1e-12, atol=1e-12)


def test_operands_of_every_matrix_in_the_blocks_are_ternary_and_those_of_the_twin_are_not() -> None:
    def operands(model: Goose) -> dict[str, set[float]]:
        seen: dict[str, set[float]] = {}
        for name, module in model.blocks.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda module, args, name=name: seen.update({name: set(args[0].unique().tolist())})
                )
        model(tokens_BT())
        return seen

    spiking, dense = operands(model_of(TINY)), operands(model_of(TWIN))
    assert len(spiking) == len(dense) == 6 * TINY.layers
    assert all(values <= {-1.0, 0.0, 1.0} and len(values) > 1 for values in spiking.values())
    assert not any(values <= {-1.0, 0.0, 1.0} for values in dense.values())


def test_counted_operations_are_the_elements_of_the_matrices() -> None:
    for config in (TINY, TWIN):
        model = Goose(config)
        blocks = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
        head = model.head.weight.numel()
        counted = operations(config)
        assert (counted.ternary, counted.dense) == ((blocks, head) if config.spikes else (0, blocks + head))
        assert layer_operations(config).ternary_share == float(config.spikes)


@BOTH
def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone(config: GooseConfig) -> None:
    state = torch.get_rng_state()
    first, again, other = Goose(config, seed=1), Goose(config, seed=1), Goose(config, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.5)
    other.init_weights(1)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in other.state_dict().items())


def test_the_dense_twin_has_the_same_parameters_and_values_but_the_spikes_own() -> None:
    spiking, dense = Goose(TINY, seed=3).state_dict(), Goose(TWIN, seed=3).state_dict()
    extra = set(spiking) - set(dense)
    assert set(dense) <= set(spiking)
    assert all(name.endswith((".spike.log_alpha", ".amplitude.amplitude")) for name in extra)
    assert all(torch.equal(value, spiking[name]) for name, value in dense.items())


def test_keys_and_values_start_from_separate_draws() -> None:
    """In the code behind the seed they were equal, and stayed so to sixteen digits: k·v is symmetric."""
    for block in Goose(GooseConfig()).blocks:
        drawn = [block.key.linear.weight, block.value.linear.weight, block.receptance.linear.weight]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            pair = torch.stack([drawn[i].flatten(), drawn[j].flatten()])
            assert torch.corrcoef(pair)[0, 1].abs() < 0.05


def test_decays_are_log_spaced_from_two_tokens_to_the_context() -> None:
    for block in Goose(GooseConfig(context=1000, width=64)).blocks:
        taus = -1 / block.memory.decay_logit.double().sigmoid().log()
        assert taus[0].item() == pytest.approx(2, rel=1e-3)
        assert taus[-1].item() == pytest.approx(1000, rel=1e-3)
        steps = taus.log().diff()
        torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=1e-2, atol=0)


def test_the_readout_is_as_loud_for_slow_channels_as_for_fast_ones() -> None:
    noise = torch.randn(8, 4000, 6, generator=torch.Generator().manual_seed(0))
    read_BTD, state_BD = LeakyMemory(6, 300)(noise)
    loud = read_BTD[:, 2000:].std(dim=(0, 1))
    assert loud.min() > 0.8 and loud.max() < 1.25
    assert state_BD.shape == (8, 6)


def test_every_layer_sees_this_token_in_every_channel_of_every_mix() -> None:
    """In the code behind the seed the share of the token before grew with depth up to 1."""
    model = Goose(GooseConfig(layers=5, width=32))
    for block in model.blocks:
        for mix in (module for module in block.modules() if isinstance(module, Mix)):
            this = mix(torch.ones(1, 1, 32), torch.zeros(1, 1, 32))
            assert this.min() >= 0.25 and this.mean() >= 0.5
            before = mix(torch.zeros(1, 1, 32), torch.ones(1, 1, 32))
            assert before.mean() > 0.25


@BOTH
def test_every_parameter_gets_a_gradient_and_only_matrices_decay(config: GooseConfig) -> None:
    model = Goose(config)
    F.cross_entropy(model(tokens_BT()).flatten(0, 1), tokens_BT(seed=1).flatten()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.1), torch.device("cpu"))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert decayed == matrices


@BOTH
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("width", "vocabulary"), [(64, 256), (256, 4096)])
def test_a_fresh_model_knows_nothing(config: GooseConfig, tied: bool, width: int, vocabulary: int) -> None:
    model = Goose(GooseConfig(vocabulary=vocabulary, width=width, layers=4, tied=tied, spikes=config.spikes))
    with torch.no_grad():
        logits = model(tokens_BT(8, 64, vocabulary=vocabulary))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT(8, 64, seed=1, vocabulary=vocabulary).flatten())
    expected = math.log(vocabulary) + 0.5 * logits.var(dim=-1).mean().item()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert logits.var(dim=-1).mean() < 0.2 * math.log(vocabulary)


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("rate", [1e-3, 3e-3])
def test_learns_a_small_batch_by_heart(config: GooseConfig, rate: float) -> None:
    model = Goose(GooseConfig(vocabulary=32, context=16, layers=2, width=64, spikes=config.spikes))
    tokens = tokens_BT(4, 17, vocabulary=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(200):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"{loss.item():.3f} nat after 200 steps")


@pytest.mark.full
@pytest.mark.parametrize("config", sample([TINY, TWIN], 1, case=lambda config: None))
def test_compiles_to_one_graph_with_equal_logits_and_gradients(config: GooseConfig) -> None:
    model, tokens = model_of(replace(config, layers=1)), tokens_BT(2, 20)
    documents = torch.tensor([[0] * 8 + [1] * 12] * 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(model(tokens, documents).square().sum(), list(model.parameters()))
    logits = compiled(tokens, documents)
    torch.testing.assert_close(logits, model(tokens, documents), rtol=1e-12, atol=1e-12)
    for found, expected in zip(
        torch.autograd.grad(logits.square().sum(), list(model.parameters())), eager, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_autocast_keeps_memory_and_thresholds_in_float32() -> None:
    model, tokens = Goose(GooseConfig(width=64)), tokens_BT(2, 100)
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, LeakyMemory):
            module.register_forward_hook(lambda module, args, output: dtypes.update({args[0].dtype, output[0].dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16 and dtypes == {torch.float32}
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert copy.deepcopy(model).bfloat16()(tokens).isfinite().all()


def test_dropout_acts_in_training_only() -> None:
    model, tokens = Goose(GooseConfig(vocabulary=17, layers=2, width=16, dropout=0.5)), tokens_BT()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def _model(kind: str, layers: int = 3, dropout: float = 0.0) -> GPT | Goose:
    if kind == "gpt":
        return GPT(GPTConfig(vocabulary=17, context=30, layers=layers, width=16, heads=2, dropout=dropout)).double()
    return Goose(GooseConfig(vocabulary=17, context=30, layers=layers, width=16, dropout=dropout)).double()


@pytest.mark.parametrize("kind", ["gpt", "goose"])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_hidden_states_are_what_the_head_and_the_blocks_read(kind: str, blocks: int) -> None:
    model, tokens, seen = _model(kind), tokens_BT(), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    hidden_BTD, layers = model.hidden(tokens, layers=(3, 0, 2))
    assert torch.equal(model.head(hidden_BTD), model(tokens))
    assert set(layers) == {0, 2, 3}
    assert torch.equal(layers[0], seen[0]) and torch.equal(layers[2], seen[2])
    assert torch.equal(model.final_norm(layers[3]), hidden_BTD)
    model.checkpoint_blocks = blocks
    again_BTD, recomputed = model.hidden(tokens, layers=(3, 0, 2))
    for found, expected in [(again_BTD, hidden_BTD), *((recomputed[layer], layers[layer]) for layer in (0, 2, 3))]:
        assert torch.equal(found, expected) and found.requires_grad


@pytest.mark.parametrize("kind", ["gpt", "goose"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_layer_that_does_not_exist_is_refused(kind: str, wrong: int) -> None:
    """In the code behind the seed a pair with one was passed over."""
    with pytest.raises(GramianError, match=f"^layers: got {wrong}; expected 0 .* to 3"):
        _model(kind).hidden(tokens_BT(), layers=(1, wrong))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_recomputed_segments_change_no_gradient_and_keep_less(size: int) -> None:
    def gradients(blocks: int) -> tuple[list[Tensor], int]:
        model = _model("goose", dropout=0.1)
        model.checkpoint_blocks = blocks
        torch.manual_seed(1)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            hidden_BTD, layers = model.hidden(tokens_BT(), layers=(1, 3))
            loss = model.head(hidden_BTD).square().mean() + layers[1].square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], sum(kept)

    (found, kept), (expected, all_kept) = gradients(size), gradients(0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept < 0.5 * all_kept


@pytest.mark.oracle
@BOTH
def test_norms_of_samples_cover_every_parameter_and_are_exact(config: GooseConfig) -> None:
    model, inputs, targets = model_of(config), tokens_BT(), tokens_BT(seed=1)

    def losses_B(rows: slice) -> Tensor:
        flat = F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten(), reduction="none")
        return flat.view(-1, inputs.shape[1]).mean(dim=1)

    with gramian.per_sample_norms(model, loss_reduction="mean") as norms:
        losses_B(slice(None)).mean().backward()
    for row in range(3):
        gradients = torch.autograd.grad(losses_B(slice(row, row + 1)).sum(), list(model.parameters()))
        expected = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        torch.testing.assert_close(norms.values[row], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("field", ["vocabulary", "context", "layers", "width", "ffn", "dropout"])
def test_a_shape_that_cannot_be_built_is_refused_by_field(field: str) -> None:
    with pytest.raises(GramianError, match=f"^{field}: .*expected"):
        GooseConfig(**{field: 0 if field != "dropout" else 1.0})  # type: ignore[arg-type]


def test_number_of_parameters_follows_from_the_shape() -> None:
    D, F_, L, V = TWIN.width, 4 * TWIN.width, TWIN.layers, TWIN.vocabulary
    dense = 2 * V * D + L * (4 * D * D + 2 * D * F_ + 4 * D + D + 6 * D) + 2 * D
    assert Goose(TWIN).num_parameters() == dense
    assert Goose(TINY).num_parameters() == dense + L * ((5 * D + F_) + (5 * D + F_))
    sites = [m for m in Goose(TINY).modules() if isinstance(m, SpikingLinear)]
    assert len(sites) == 6 * L and all(isinstance(m.spike, Spike) for m in sites)
