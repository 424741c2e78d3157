"""diag F of K-FAC factors against tokens from plain hooks and products with unit vectors; tokens' shares against hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramian
from gramian.curvature import TokenImportance, parameter_importance, token_importance
from gramian.curvature.estimate.likelihood import IGNORE, Softmax
from gramian.models import GPT, GPTConfig
from gramian.oracles import dense_kfac
from gramian.statistics import DiagonalFisherEstimate, TokenTraces, by_row
from gramian.taps.records import LayerRecord
from tests.curvature.problems import cross_entropy, kfac
from tests.curvature.small import FEW, MANY, net, words
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.statistics.problems import assert_tensors, problem

pytestmark = pytest.mark.oracle

LINEAR = {"q": False, "k": False, "v": False, "fc": True, "head": False}
"""{layer: whether it has a bias}."""


def gpt() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(GPTConfig(vocabulary=13, context=6, layers=1, width=8, heads=2)).double()


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_the_diagonal_is_that_of_the_kronecker_product_of_tokens_from_hooks(shape: tuple[int, int]) -> None:
    model, batch = net(dtype=torch.float64), words(shape)
    terms = batch[1].numel()
    curvature = kfac()
    with curvature.capture(model, num_terms=terms, loss_reduction="sum"):
        cross_entropy(model, *batch).backward()
    found = parameter_importance(curvature)
    assert found.keys() == dict(model.named_parameters()).keys()
    tokens = dense_kfac.layer_tokens(model, lambda: cross_entropy(model, *batch).backward(), ["table", *LINEAR])
    for layer, bias in LINEAR.items():
        A, G = dense_kfac.factors(tokens[layer], terms, 1.0, bias)
        whole = torch.kron(G, A).diagonal().reshape(len(G), len(A))
        want = {f"{layer}.weight": whole[:, :-1], f"{layer}.bias": whole[:, -1]} if bias else {f"{layer}.weight": whole}
        assert_tensors({name: found[name] for name in want}, want, 1e-10)
    counts = torch.bincount(batch[0].flatten(), minlength=11).double() / terms
    squares = tokens["table"].gradients_TO.square().sum(0) / terms
    assert_tensors({"table": found["table.weight"]}, {"table": torch.outer(counts, squares)}, 1e-10)


CAPTURED = ["conv2d", "tied_gpt", "padded_embedding"]


@pytest.mark.parametrize(
    "name, fisher_type",
    [
        *((name, "empirical") for name in CAPTURED),
        ("linear_3d", "true"),
        pytest.param("hf_gpt2", "empirical", marks=pytest.mark.full),
    ],
)
def test_an_entry_is_the_quadratic_form_of_its_unit_vector(name: str, fisher_type: str) -> None:
    case = CASES[name]
    model = case.make(torch.float64)
    batch = case.make_batch(5, torch.float64, torch.Generator().manual_seed(0))
    curvature = kfac()
    curvature.collect_kfac_factors(model, batch, fisher_type, causal_shift=False)
    found = parameter_importance(curvature)
    assert found.keys() == {key for key, p in model.named_parameters() if p.requires_grad}
    for key, p in model.named_parameters():
        assert found[key].shape == p.shape and found[key].dtype == torch.float64
        for entry in range(0, p.numel(), max(1, p.numel() // 4)):
            unit = torch.zeros_like(p).flatten()
            unit[entry] = 1.0
            want = curvature.quadratic_form({key: unit.reshape(p.shape)})
            assert float(found[key].flatten()[entry]) == pytest.approx(want, rel=1e-10, abs=1e-18), key


class MostEntries(TorchDispatchMode):
    """The most entries that any result has; views of what is there count as what they show."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.entries = max(self.entries, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)), 0)
        return result


def test_nothing_larger_than_the_parameter_is_written() -> None:
    model = nn.Linear(40, 3, bias=False)
    curvature = kfac(kfac_use_woodbury=False)
    with curvature.capture(model, num_terms=64):
        model(torch.randn(64, 40)).square().sum(1).mean().backward()
    with MostEntries() as seen:
        parameter_importance(curvature)
    assert seen.entries <= 40 * 3


class Watched(TokenTraces):
    """Notes what its updates write."""

    entries = 0

    def update(self, sums: Any, record: LayerRecord) -> None:
        with MostEntries() as seen:
            super().update(sums, record)
        self.entries = max(self.entries, seen.entries)


def test_shares_of_tokens_are_norms_and_nothing_wider() -> None:
    model, (x, y), traces = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 50)).bfloat16(), words((4, 6)), Watched()
    with gramian.observe(model, traces, audit=False):
        cross_entropy(model, x, y).backward()
    assert traces.entries == 4 * 6


def test_an_estimate_of_the_diagonal_is_handed_on() -> None:
    p, estimate = problem("mlp", 4), DiagonalFisherEstimate()
    model = p.model()
    with estimate.capture(model):
        p.backward(model, p.batch)
    assert_tensors(parameter_importance(estimate), p.fisher(), 1e-10)


def test_sources_that_have_seen_nothing_are_refused() -> None:
    with refusal("^source: has seen no sample"):
        parameter_importance(DiagonalFisherEstimate())
    with refusal("^source: has no factors yet"):
        parameter_importance(kfac())
    with refusal("^source: expected .*, got str"):
        parameter_importance("fisher.pt")  # type: ignore[arg-type]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def by_hooks(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """{layer: ‖g_t‖²‖[a_t; 1]‖²}, [B, T], and {weight: its rows} of linear layers and tables, one token after another."""
    kinds = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    seen = dense_kfac.layer_tokens(model, lambda: cross_entropy(model, x_BT, y_BT).backward(), [*kinds])
    tokens, rows = {}, {}
    for layer, module in kinds.items():
        inputs, gradients = seen[layer]
        gradients = gradients.reshape(-1, *y_BT.shape[1:], gradients.shape[-1]).expand(*y_BT.shape, -1).flatten(0, 1)
        if isinstance(module, nn.Embedding):
            tokens[layer] = gradients.square().sum(1).reshape(y_BT.shape)
            continue
        outer = [torch.outer(g, a) for g, a in zip(gradients, inputs, strict=True)]
        whole = torch.stack([m.square().sum() for m in outer])
        if module.bias is not None:
            whole = whole + gradients.square().sum(1)
        tokens[layer] = whole.reshape(y_BT.shape)
        rows[f"{layer}.weight"] = sum(m.square().sum(1) for m in outer)
    return tokens, rows


@pytest.mark.parametrize("make", [lambda: net(dtype=torch.float64), gpt], ids=["words", "gpt"])
def test_shares_of_tokens_and_rows_are_those_of_hooks(make: Any) -> None:
    model = make()
    x, y = words((3, 6), count=11)
    y[0, 4:] = IGNORE
    found = token_importance(model, (x, y))
    tokens, rows = by_hooks(make(), x, y)
    shared = {layer for layer in tokens if "position" in layer}  # its rows stand for all samples at once in the hooks
    wanted = {layer: t for layer, t in tokens.items() if layer not in shared}
    assert len(wanted) >= 5
    assert_tensors({layer: found.layers[layer] for layer in wanted}, wanted, 1e-10)
    assert_tensors({name: found.rows[name] for name in rows}, rows, 1e-10)
    head = next(layer for layer in found.layers if "head" in layer)
    assert not found.layers[head][0, 4:].any()
    torch.testing.assert_close(found.tokens, sum(found.layers.values()), rtol=1e-12, atol=0)
    assert found.untold == []


def test_rows_of_a_table_are_the_shares_of_its_words() -> None:
    model, (x, y) = net(dtype=torch.float64), words(MANY)
    found = token_importance(model, (x, y))
    want = [float(found.layers["table"][x == word].sum()) for word in range(11)]
    torch.testing.assert_close(found.rows["table.weight"], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


def test_shares_add_up_to_the_trace_of_the_fisher_per_token() -> None:
    model, (x, y) = gpt(), words((4, 6))
    found, fisher = token_importance(model, (x, y)), gramian.DiagonalFisher("token")
    with gramian.observe(model, fisher, loss_reduction="sum") as seen:
        cross_entropy(model, x, y).backward()
    assert float(found.tokens.sum()) == pytest.approx(4 * sum(float(d.sum()) for d in seen[fisher].values()), rel=1e-10)
    assert_tensors(found.rows, {k: 4 * by_row(d) for k, d in seen[fisher].items() if d.dim() > 1}, 1e-10)


def test_drawn_labels_give_the_mean_over_draws() -> None:
    model, (x, _) = net(dtype=torch.float64), words(MANY)
    found = token_importance(model, {"x_BT": x}, "mc", n_samples=3, seed=5)
    apart: list[TokenImportance] = []
    for draw in range(3):
        labels = Softmax().draw(model(x), 5, torch.arange(len(x)), draw)
        apart.append(token_importance(model, (x, labels)))
    assert_tensors(found.layers, {k: sum(one.layers[k] for one in apart) / 3 for k in found.layers}, 1e-12)
    assert_tensors(found.rows, {k: sum(one.rows[k] for one in apart) / 3 for k in found.rows}, 1e-12)


def test_layers_that_see_fewer_tokens_are_named() -> None:
    case = CASES["vit"]
    batch = case.make_batch(3, torch.float64, torch.Generator().manual_seed(0))
    found = token_importance(case.make(torch.float64), batch)
    assert found.untold and found.tokens.shape[0] == 3 and found.tokens.shape[1] > 1
    assert all(found.layers[layer].shape[1] < found.tokens.shape[1] for layer in found.untold)


def test_the_model_is_left_as_it_was() -> None:
    model, batch = net(dtype=torch.float64), words(MANY)
    cross_entropy(model, *batch).backward()
    before, state = {n: p.grad.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    token_importance(model, batch, "mc")
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_tokens_to_tell_is_refused() -> None:
    model, (x, y) = net(dtype=torch.float64), words(MANY)
    for arguments, words_ in (
        (((x, y), "true"), 'fisher_type: expected "empirical" or "mc"'),
        (({"x_BT": x},), "labels: expected them in the batch"),
        (((x, y + 11),), "labels: hold"),
        (((x, y[:, :3]),), "labels: have shape"),
    ):
        with refusal(f"^{words_}"):
            token_importance(model, *arguments)
    for seed in ("a", 1.5, None, 2**63):
        with refusal("^seed: expected an integer"):
            token_importance(model, (x, y), "mc", seed=seed)  # type: ignore[arg-type]
    with refusal("^batch: has no rows"):
        token_importance(model, (x[:0], y[:0]))
    with gramian.observe(model, gramian.Health()), refusal("^model: is inside an open"):
        cross_entropy(model, x, y).backward()
        token_importance(model, (x, y))


@pytest.mark.full
def test_a_causal_model_predicts_the_next_token() -> None:
    case = CASES["hf_gpt2"]
    model = case.make(torch.float64)
    x, _ = case.make_batch(3, torch.float64, torch.Generator().manual_seed(0))
    found = token_importance(model, {"input_ids": x})
    head = next(layer for layer in found.layers if "head" in layer)
    assert not found.layers[head][:, -1].any() and found.layers[head][:, :-1].all()
