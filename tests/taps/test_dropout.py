"""Dropout inside layers that run again sample by sample: each sample's gradient is that under its own mask of the forward.

On a CPU a capture draws the numbers that the model draws without one. So the reference is an untouched copy from the same
seed, of whose batch each sample's term is differentiated by itself; and, for attention and recurrent layers, the layer written
out by hand on one sample at a time, with masks that the test draws.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.oracles.clipped_sum import clip
from gramian.privacy.clipping.clip_factors import SLACK
from gramian.taps.model.dropout import WithoutDropout, with_zero_biases
from gramian.taps.sites.dropout_masks import RecordedMasks
from tests.kit.matrix import FULL
from tests.kit.refusals import refused
from tests.kit.toys import Toy
from tests.privacy.problems import assert_sums, private
from tests.taps.checks import assert_norms

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]
STORAGES = ["auto", "bookkeeping", "keep", "two_pass"]
SEED, B, T, D = 7, 3, 4, 8


def own(run: Callable[..., Any], **parts: Any) -> Toy:
    """A layer with a parameter of its own, `gain`."""
    return Toy(run, gain=nn.Parameter(torch.rand(D) + 0.5), **parts)


def attention(net: Toy, x: Tensor, **options: Any) -> Tensor:
    q, k = (t.view(*x.shape[:2], 2, D // 2).transpose(1, 2) for t in (x * net.gain, x))
    return F.scaled_dot_product_attention(q, k, k, dropout_p=0.3, **options).transpose(1, 2).flatten(2)


def attends(weights: bool, **options: Any) -> Toy:
    return Toy(
        lambda net, x: net.attention(x, x, x, need_weights=weights)[0],
        attention=nn.MultiheadAttention(D, 2, dropout=0.4, batch_first=True, **options),
    )


def recurs(layer: type[nn.RNNBase], **options: Any) -> Toy:
    width = options.get("proj_size", 4) * (1 + options.get("bidirectional", False))
    made = layer(D, 4, 2, dropout=0.4, batch_first=True, **options)
    return Toy(lambda net, x: net.out(net.layer(x)[0]), layer=made, out=nn.Linear(width, D))


def decodes() -> Toy:
    layer = nn.TransformerDecoderLayer(D, 2, 12, dropout=0.3, batch_first=True)
    return Toy(lambda net, x: net.layer(x, x.flip(1)), layer=layer)


SEEN = torch.ones(T, T, dtype=torch.bool).tril(-1)  # of the first token nothing
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention, with weights": lambda: attends(True),
    "attention": lambda: attends(False),
    "attention with a bias of keys": lambda: attends(False, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(D, 2, 12, dropout=0.3, batch_first=True),
    "decoder layer": decodes,
    "LSTM": lambda: recurs(nn.LSTM),
    "GRU": lambda: recurs(nn.GRU),
    "RNN": lambda: recurs(nn.RNN),
    "LSTM, both directions": lambda: recurs(nn.LSTM, bidirectional=True, bias=False),
    "LSTM with projections": lambda: recurs(nn.LSTM, proj_size=2),
    "dropout": lambda: own(lambda net, x: F.dropout(x, 0.3) * net.gain),
    "dropout in place": lambda: own(lambda net, x: F.dropout(x * net.gain, 0.3, inplace=True)),
    "dropout1d": lambda: own(lambda net, x: F.dropout1d(x * net.gain, 0.3)),
    "dropout2d": lambda: own(lambda net, x: F.dropout2d((x * net.gain)[..., None], 0.3)[..., 0]),
    "dropout3d": lambda: own(lambda net, x: F.dropout3d((x * net.gain)[..., None, None], 0.3).flatten(2)),
    "alpha dropout": lambda: own(lambda net, x: F.alpha_dropout(x * net.gain, 0.3, training=True)),
    "alpha dropout in place": lambda: own(lambda net, x: nn.AlphaDropout(0.3, inplace=True)(x * net.gain)),
    "feature alpha dropout": lambda: own(lambda net, x: F.feature_alpha_dropout(x * net.gain, 0.3, training=True)),
    "native dropout": lambda: own(lambda net, x: torch.native_dropout(x * net.gain, 0.3, True)[0]),
    "all dropped": lambda: own(lambda net, x: F.dropout(x, 1.0) + x * net.gain),
    "a child": lambda: own(lambda net, x: net.drop(net.layer(x)) * net.gain, drop=nn.Dropout(0.3), layer=nn.Linear(D, D)),
    "sdpa": lambda: own(attention),
    "sdpa, causal": lambda: own(lambda net, x: attention(net, x, is_causal=True)),
    "sdpa, mask": lambda: own(lambda net, x: attention(net, x, attn_mask=SEEN.to(x.device))),
    "sdpa, bias": lambda: own(lambda net, x: attention(net, x, attn_mask=x[:, None, :, :T].detach(), scale=0.3)),
    "dropout of a weight": lambda: own(
        lambda net, x: F.linear(x, F.dropout(net.weight, 0.3)) * net.gain, weight=nn.Parameter(torch.rand(D, D))
    ),
    "k rows a sample": lambda: own(lambda net, x: (F.dropout(x.flatten(0, 1), 0.3) * net.gain).view(x.shape)),
    "time first": lambda: own(lambda net, x: (F.dropout(x.transpose(0, 1), 0.3) * net.gain).transpose(0, 1)),
    "layers inside a layer": lambda: own(
        lambda net, x: F.dropout(net.recurs(net.attends(x)) * net.gain, 0.2, net.training),
        attends=attends(False), recurs=recurs(nn.LSTM),
    ),  # fmt: skip
}  # fmt: skip
FEW = ["attention", "LSTM", "layers inside a layer"]
SHORT = [
    *FEW,
    "attention, with weights",
    "decoder layer",
    "dropout in place",
    "dropout2d",
    "alpha dropout",
    "sdpa, mask",
]


def some_of(names: list[str]) -> list[Any]:
    """Every case; those that are not named in the entire matrix only."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in LAYERS]


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A linear layer, whose inputs depend on the sample, and the named layer; a batch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), LAYERS[name]()).double()
    return model, torch.randn(B, T, D, dtype=torch.float64)


def terms(model: nn.Module, x: Tensor, seed: int = SEED) -> Tensor:
    """Σ y² of each sample, [B], with random numbers of this seed."""
    torch.manual_seed(seed)
    return model(x).square().flatten(1).sum(1)


def rows(model: nn.Module, x: Tensor, seed: int = SEED) -> dict[str, Tensor]:
    """Per-sample gradients of an untouched copy, which draws masks of the same seed, term by term."""
    copy = deepcopy(model)
    terms_B, parameters = terms(copy, x, seed), dict(copy.named_parameters())
    found = [
        torch.autograd.grad(t, list(parameters.values()), retain_graph=True, materialize_grads=True) for t in terms_B
    ]
    return dict(zip(parameters, map(torch.stack, zip(*found, strict=True)), strict=True))


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    return sum((g.flatten(1).square().sum(1) for g in gradients.values()), torch.zeros(())).sqrt()


def captured(model: nn.Module, x: Tensor, runs: nn.Module | None = None) -> Tensor:
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        terms(runs or model, x).sum().backward()
    return norms.values


@pytest.mark.parametrize("name", some_of(SHORT))
def test_norms_are_those_of_each_samples_own_mask(name: str) -> None:
    model, x = build(name)
    want, plain = rows(model, x), deepcopy(model)
    terms(plain, x).sum().backward()
    assert_norms(captured(model, x), norms_of(want), 1e-10)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):  # the draw is the user's own
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("storage", STORAGES if FULL else ["auto"])
@pytest.mark.parametrize("name", some_of(["attention", "LSTM"]))
def test_private_sums_are_those_of_each_samples_own_mask(name: str, storage: str) -> None:
    model, x = build(name)
    first, second = rows(model, x), rows(model, x.flip(2), seed=SEED + 1)
    both = {key: torch.cat([g, second[key]]) for key, g in first.items()}
    limit = 0.9 * float(norms_of(both).median())
    with private(model, limit, clipping=storage, loss_reduction="sum") as run:
        run.engine.backward(terms(model, x).sum())
        run.engine.backward(terms(model, x.flip(2), seed=SEED + 1).sum())  # accumulates
        assert_sums(run.gradients(), clip(both, limit / (1 + SLACK[torch.float64])).totals, 1e-10)


# ---- by hand, one sample at a time -----------------------------------------------------------------------------------


def attention_by_hand(layer: nn.MultiheadAttention, x_TD: Tensor, keep_HTT: Tensor) -> Tensor:
    q, k, v = F.linear(x_TD, layer.in_proj_weight, layer.in_proj_bias).view(T, 3, 2, D // 2).unbind(1)
    scores_HTT = torch.einsum("thd,shd->hts", q, k) / (D // 2) ** 0.5
    weights_HTT = scores_HTT.softmax(-1) * keep_HTT / (1 - layer.dropout)
    mixed_TD = torch.einsum("hts,shd->thd", weights_HTT, v).reshape(T, D)
    return mixed_TD @ layer.out_proj.weight.T + layer.out_proj.bias


@pytest.mark.parametrize("weights", [False, True])
def test_attention_is_the_formula_with_the_masks_that_were_drawn(weights: bool) -> None:
    torch.manual_seed(1)
    model, x = attends(weights).double(), torch.randn(B, T, D, dtype=torch.float64)
    torch.manual_seed(SEED)
    keep_BHTT = torch.empty(B, 2, T, T, dtype=torch.float64).bernoulli_(0.6)
    parameters = list(model.parameters())
    want = []
    for x_TD, keep_HTT in zip(x, keep_BHTT, strict=True):
        gradients = torch.autograd.grad(attention_by_hand(model.attention, x_TD, keep_HTT).square().sum(), parameters)
        want.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    assert_norms(captured(model, x), torch.stack(want), 1e-10)


def test_a_recurrent_layer_is_its_layers_with_the_masks_that_were_drawn() -> None:
    torch.manual_seed(1)
    model = Toy(lambda net, x: net.layer(x)[0], layer=nn.GRU(D, 4, 2, dropout=0.4, batch_first=True)).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    torch.manual_seed(SEED)
    keep_TBH = torch.empty(T, B, 4, dtype=torch.float64).bernoulli_(0.6)
    parameters, layer = list(model.parameters()), model.layer
    want = []
    for i in range(B):
        inputs = list(x[i])
        for number, weights in enumerate((parameters[:4], parameters[4:])):
            h = x.new_zeros(1, 4)
            inputs = [h := torch.gru_cell(a.view(1, -1), h, *weights) for a in inputs]
            if number == 0:
                inputs = [a * keep_TBH[t, i] / 0.6 for t, a in enumerate(inputs)]
        gradients = torch.autograd.grad(torch.cat(inputs).square().sum(), parameters)
        want.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    assert layer.dropout == 0.4
    assert_norms(captured(model, x), torch.stack(want), 1e-10)


# ---- the masks -------------------------------------------------------------------------------------------------------


def drawn(x: Tensor, seed: int, calls: int = 2, p: float = 0.3) -> list[Tensor]:
    """The outputs of calls of dropout of ones inside one forward of a captured layer, beside x: zeros where it dropped."""
    seen: list[Tensor] = []

    def run(net: Toy, x: Tensor) -> Tensor:
        parts = [F.dropout(torch.ones_like(x), p) for _ in range(calls)]
        seen[:] = parts
        return (x + sum(parts)) * net.gain

    model = own(run)
    with gramian.per_sample_norms(model, loss_reduction="sum", proof="off"):
        torch.manual_seed(seed)
        loss = model(x).square().sum()
        masks = list(seen)
        loss.backward()
    return masks


def test_masks_keep_1_minus_p_and_differ_by_call_row_and_step() -> None:
    first, second = drawn(torch.randn(64, 100, D), SEED)
    n = first.numel()
    for mask in (first, second):
        kept = float((mask > 0).double().mean())
        assert abs(kept - 0.7) < 5 * (0.7 * 0.3 / n) ** 0.5
        assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - 0.3))}
    assert not torch.equal(first, second)
    for one, other in ((first, second), (first[:-1], first[1:]), (first, drawn(first, SEED + 1)[0])):
        both = float(((one > 0) & (other > 0)).double().mean())
        assert abs(both - 0.49) < 5 * (0.49 * 0.51 / one.numel()) ** 0.5  # independent
    assert torch.equal(first, drawn(torch.zeros_like(first), SEED)[0])


@pytest.mark.parametrize(
    "name", ["attention", "rrelu", *(pytest.param(n, marks=pytest.mark.full) for n in ["LSTM", "sdpa, mask"])]
)
def test_a_row_does_not_depend_on_who_else_is_in_the_batch(name: str) -> None:
    LAYERS.setdefault("rrelu", rrelu)
    model, x = build(name)
    torch.manual_seed(3)
    others = torch.cat([torch.randn_like(x[:1]), x[1:2], torch.randn_like(x[2:])])
    one, other = captured(model, x), captured(model, others)
    assert torch.equal(one[1], other[1]) and not torch.isclose(one[0], other[0])


def rrelu() -> Toy:
    return own(lambda net, x: F.rrelu(x, training=True) * net.gain)


def test_slopes_of_rrelu_are_drawn_for_every_value() -> None:
    """Torch draws for negative values only, so that a row's slopes would depend on the signs of the rows before it."""
    torch.manual_seed(1)
    model, x = rrelu().double(), torch.randn(B, T, D, dtype=torch.float64)
    torch.manual_seed(SEED)
    slope = -torch.rrelu(-torch.ones_like(x), training=True)
    y = torch.where(x >= 0, x, slope * x)
    # Σ (y g)² has the gradient 2 Σ_t y² g
    assert_norms(captured(model, x), (2 * y.square().sum(1) * model.gain).norm(dim=1).detach(), 1e-10)


# ---- modes, checkpoints, compile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "LSTM"])
def test_in_evaluation_mode_nothing_looks_for_dropout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(name)
    model.eval()
    want, y = rows(model, x), deepcopy(model)(x)
    monkeypatch.setattr(RecordedMasks, "__enter__", lambda mode: pytest.fail("a mode was entered"))
    assert_norms(captured(model, x), norms_of(want), 1e-10)
    with gramian.per_sample_norms(model, loss_reduction="sum"):
        seen = model(x)
        assert torch.equal(seen, y)
        seen.sum().backward()


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize(
    "name", ["sdpa", *(pytest.param(n, marks=pytest.mark.full) for n in ["attention", "LSTM", "dropout"])]
)
def test_masks_of_recomputed_layers_are_drawn_again(name: str, around: bool) -> None:
    model, x = build(name)
    model[1] = recomputed(model[1])
    model = model if around else Toy(lambda net, x: net.inner(x) * net.gain, gain=model[0].bias, inner=model).double()
    assert_norms(captured(model, x), norms_of(rows(model, x)), 1e-10)


def recomputed(layer: nn.Module) -> Toy:
    return Toy(lambda net, x: checkpoint(net.layer, x, use_reentrant=False), layer=layer)


RECURRENT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "LSTM": (torch.lstm, nn.LSTM, {}),
    "LSTM with projections": (torch.lstm, nn.LSTM, {"proj_size": 2}),
    "GRU": (torch.gru, nn.GRU, {}),
    "RNN": (torch.rnn_tanh, nn.RNN, {}),
    "RNN, relu": (torch.rnn_relu, nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_with_zero_biases_are_those_without(name: str, both: bool) -> None:
    torch.manual_seed(1)
    func, kind, options = RECURRENT[name]
    layer = kind(D, 4, 2, bias=False, batch_first=True, bidirectional=both, dtype=torch.float64, **options)
    x, stacks = torch.randn(B, T, D, dtype=torch.float64), 2 * (1 + both)
    states = [torch.randn(stacks, B, size, dtype=torch.float64) for size in (options.get("proj_size", 4), 4)]
    begin = states if kind is nn.LSTM else states[0]
    weights = layer._flat_weights
    without = func(x, begin, weights, False, 2, 0.0, True, both, True)
    zeros = with_zero_biases(weights, stacks)
    found = func(x, begin, zeros, True, 2, 0.0, True, both, True)
    for one, other in zip(found, without, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-15)
    with_biases = kind(D, 4, 2, batch_first=True, bidirectional=both, **options)
    assert [t.shape for t in zeros] == [t.shape for t in with_biases._flat_weights]
    want = torch.autograd.grad(without[0].square().sum(), weights)
    for one, other in zip(torch.autograd.grad(found[0].square().sum(), weights), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_rrelu_in_a_checkpoint_inside_a_layer_that_runs_again_is_refused() -> None:
    inner = recomputed(Toy(lambda net, x: F.rrelu(net.layer(x), training=True), layer=nn.Linear(D, D)))
    model = own(lambda net, x: net.inner(x) * net.gain, inner=inner)
    with refused("model (Toy)", "rrelu", "checkpoint around the layer"):
        captured(model, torch.randn(B, T, D))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in FEW])
def test_compiled_models_run_such_layers_eagerly(name: str) -> None:
    model, x = build(name)
    want = norms_of(rows(model, x))
    torch._dynamo.reset()
    assert_norms(captured(model, x, runs=torch.compile(model, backend="aot_eager")), want, 1e-10)


@pytest.mark.full
def test_dropout_of_a_compiled_part_of_such_a_layer_is_refused() -> None:
    part = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))
    model = own(lambda net, x: net.part(x) * net.gain, part=torch.compile(part, backend="aot_eager"))
    with refused("model (Toy)", "dropout that runs eagerly", "expected"):
        captured(model, torch.randn(B, T, D))


@pytest.mark.parametrize("name", ["attention, with weights", "attention", "LSTM", "dropout in place", "dropout2d"])
def test_without_dropout_all_of_it_rests(name: str) -> None:
    model, x = build(name)
    for around in (nullcontext, RecordedMasks):
        with WithoutDropout(), around():
            assert torch.equal(model(x), model(x))
            torch.testing.assert_close(model(x), deepcopy(model).eval()(x), rtol=1e-12, atol=1e-12)


# ---- what is refused -------------------------------------------------------------------------------------------------


@contextmanager
def stopped(*words: str) -> Iterator[None]:
    with refused("1 (Toy)", *words):
        yield


@pytest.mark.parametrize("more", [True, False])
def test_a_layer_that_drops_out_by_the_size_of_its_batch_is_refused(more: bool) -> None:
    def run(net: Toy, x: Tensor) -> Tensor:
        for _ in range(1 + (more == (len(x) == 1))):
            x = F.dropout(x, 0.3)
        return x * net.gain

    with stopped("drops values out", "times", "expected the same calls"):
        captured(nn.Sequential(nn.Linear(D, D), own(run)), torch.randn(B, T, D))


def test_masks_that_do_not_grow_with_the_batch_are_refused() -> None:
    def run(net: Toy, x: Tensor) -> Tensor:
        return x * net.gain * F.dropout(torch.ones(2 + len(x)), 0.3).mean()

    with stopped("drops out [5] values for the batch of 3", "[3] for a sample alone", "expected 3 times"):
        captured(nn.Sequential(nn.Linear(D, D), own(run)), torch.randn(B, T, D))


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.randn_like, lambda x: torch.bernoulli(torch.full_like(x, 0.5))]
)
def test_other_random_numbers_inside_such_a_layer_are_refused(draw: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(D, D), own(lambda net, x: F.dropout(x * draw(x), 0.2) * net.gain))
    with stopped("random numbers", "expected a deterministic layer"):
        captured(model, torch.randn(B, T, D))


def test_masks_whose_rows_lie_interleaved_are_refused() -> None:
    def run(net: Toy, x: Tensor) -> Tensor:
        return (F.dropout(x.transpose(0, 1).flatten(0, 1), 0.3) * net.gain).view(T, len(x), D).transpose(0, 1)

    with stopped("gives other outputs"):
        captured(nn.Sequential(nn.Linear(D, D), own(run)), torch.randn(B, T, D))
