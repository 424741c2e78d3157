"""Influence scores against the explicit inverse and a loop of single-sample backwards."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.curvature import Influence, influence_scores
from gramian.curvature.uses.influence_scores import products
from gramian.oracles import single_sample
from gramian.taps.gradients import Outer
from tests.curvature.problems import TOLERANCE, assert_close, kfac, normal
from tests.curvature.small import loss_of, words
from tests.curvature.uses import KINDS, TASKS, data, flat, gradient_of, names_of, network, task, written_out
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.kit.refusals import refused
from tests.oracles import dense_uses
from tests.statistics.problems import problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]
JOINT: dict[str, Any] = {"damping_mode": "joint", "damping": 0.02, "use_eigenvalue_correction": False}
LIKELY = {
    "tied_gpt": 1, "vit": 1, "convnet": 3, "reused": 3, "padded_embedding": 3, "rmsnorm": 1, "mha": 3, "unused": 1,
}  # fmt: skip
"""Every form of a gradient, and the number of queries it is tried with; all cases with one query and three when FULL."""
MATRIX = [*itertools.product(CASES, (1, 3))] if FULL else [*LIKELY.items()]


class Problem:
    """A Fisher with joint damping, two queries and five training samples, each of them also as flat vectors."""

    def __init__(self, kind: str = "dense", **options: Any) -> None:
        self.model = network(kind)
        self.kfac = task(self.model, TASKS[0], kind, **{**JOINT, **options})
        names = names_of(self.model)
        self.queries = [gradient_of(self.model, data(kind, seed)) for seed in (5, 6)]
        count = KINDS[kind].get("words", 11)
        self.batch = words((5, 4), seed=7, count=count)
        loop = single_sample.per_sample_gradients(self.model, partial(loss_of_batch, reduction="sum"), self.batch)
        self.samples_BP = torch.cat([loop[name].flatten(1) for name in names], dim=1)
        self.queries_QP = torch.stack([flat(query, names) for query in self.queries])
        F = written_out(self.kfac, self.model)
        inverse = torch.linalg.inv(F + self.kfac.options.damping * torch.eye(len(F), dtype=torch.float64))
        self.expected_BQ = dense_uses.influence(inverse, self.queries_QP, self.samples_BP)

    def rows(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.batch[0][index], self.batch[1][index]


def loss_of_batch(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    """Σ over samples of the sum over their tokens, or the mean over samples of it."""
    total = loss_of(model, (x, y), "sum")
    return total if reduction == "sum" else total / len(x)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_explicit_inverse(kind: str) -> None:
    p = Problem(kind)
    with influence_scores(p.kfac, p.model, p.queries, loss_reduction="mean") as scores:
        loss_of_batch(p.model, *p.batch, reduction="mean").backward()
    assert_close(scores.values, p.expected_BQ)
    assert {cover.status for cover in scores.coverage.values()} == {"covered"}


def test_one_query_is_what_the_gradients_hold() -> None:
    p = Problem()
    loss_of(p.model, data("dense", 5), "sum").backward()
    with influence_scores(p.kfac, p.model, loss_reduction="sum") as scores:
        loss_of_batch(p.model, *p.batch).backward()
    assert_close(scores.values, p.expected_BQ[:, 0])


def test_any_split_of_the_training_data_is_one_pass() -> None:
    p = Problem()
    with influence_scores(p.kfac, p.model, p.queries) as scores:
        for rows in (slice(0, 1), slice(1, 4), slice(4, 5)):
            loss_of_batch(p.model, *p.rows(rows), reduction="mean").backward()
    assert_close(scores.values, p.expected_BQ, 1e-13)
    first, second = Influence(p.kfac, p.model, p.queries), []
    for rows in (slice(0, 2), slice(2, 5)):
        with gramian.observe(p.model, first, loss_reduction="sum") as seen:
            loss_of_batch(p.model, *p.rows(rows)).backward()
        second.append(seen.sums(first))
    assert_close(first.finish(first.merge(*second)), p.expected_BQ, 1e-13)


def test_padded_is_ragged() -> None:
    p = Problem()
    lengths = (4, 2, 3, 1, 4)
    ragged = []
    for row, length in enumerate(lengths):
        with influence_scores(p.kfac, p.model, p.queries, loss_reduction="sum") as scores:
            loss_of_batch(p.model, p.batch[0][row : row + 1, :length], p.batch[1][row : row + 1, :length]).backward()
        ragged.append(scores.values)
    labels = p.batch[1].clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    with influence_scores(p.kfac, p.model, p.queries, loss_reduction="sum") as scores:
        loss_of_batch(p.model, p.batch[0], labels).backward()
    assert_close(scores.values, torch.cat(ragged), 1e-13)


@pytest.mark.parametrize("mode", ["pi", "factored", "joint"])
def test_the_influence_of_a_sample_on_itself_is_its_squared_natural_norm(mode: str) -> None:
    model = network()
    found = task(model, TASKS[0], damping_mode=mode)
    batch = words((1, 4), seed=7)
    gradient = gradient_of(model, batch)
    with influence_scores(found, model, gradient, loss_reduction="sum") as scores:
        loss_of(model, batch, "sum").backward()
    assert -scores.values.item() == pytest.approx(found.natural_gradient_norm(model, gradient) ** 2, rel=TOLERANCE)


def test_a_query_without_a_bias_still_meets_the_bias_of_samples() -> None:
    """(F + damping)⁻¹ mixes weight and bias: a part that is zero in the query is not zero in the direction."""
    p = Problem()
    query = {"fc.weight": p.queries[0]["fc.weight"]}
    filled = {n: g if n in query else torch.zeros_like(g) for n, g in p.queries[0].items()}
    scores = []
    for asked in (query, filled):
        with influence_scores(p.kfac, p.model, asked) as found:
            loss_of_batch(p.model, *p.batch, reduction="mean").backward()
        scores.append(found.values)
    assert_close(scores[0], scores[1], 1e-13)
    assert "fc.bias" in Influence(p.kfac, p.model, query).directions


@pytest.mark.parametrize("name, queries", MATRIX)
def test_products_with_directions_are_those_of_the_loop_in_every_kind_of_layer(name: str, queries: int) -> None:
    p = problem(name, 4)
    model = p.model()
    influence = Influence.__new__(Influence)
    influence.single, influence.queries, influence.by = False, queries, "sample"
    influence.directions = {
        key: normal(queries, *g.shape[1:], seed=i).to(g) for i, (key, g) in enumerate(p.gradients.items())
    }
    by_token = influence.divided("token")
    with gramian.observe(model, influence, by_token) as seen:
        p.backward(model, p.batch)
    expected = -sum(g.flatten(1) @ influence.directions[key].flatten(1).mT for key, g in p.gradients.items())
    tolerance = 1e-6 if p.case.computes_in_float32 else TOLERANCE
    assert_close(seen[influence], expected, tolerance)
    assert_close(seen[by_token].sum(2), expected, tolerance)


def test_no_gradient_of_a_sample_is_formed_for_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outer, "per_sample", lambda self: pytest.fail("written out"))
    gradient = Outer(normal(3, 6, 5), normal(3, 6, 7, seed=1))
    direction = normal(1, 5, 7, seed=2)
    expected = torch.einsum("btm,btn,qmn->bq", gradient.left_BTM, gradient.right_BTN, direction)
    assert_close(products(gradient, direction), expected)


def test_a_bfloat16_model_has_float32_scores() -> None:
    p = Problem()
    p.model.bfloat16()
    with influence_scores(p.kfac, p.model, p.queries, loss_reduction="sum") as scores:
        loss_of_batch(p.model, *p.batch).backward()
    assert scores.values.dtype == torch.float32
    assert_close(scores.values, p.expected_BQ, 0.05)  # weights and activations are rounded to 8 bits


def test_what_has_no_score_is_refused_in_one_line() -> None:
    p = Problem()
    with refused("queries:", "expected"):
        influence_scores(p.kfac, p.model, [])
    p.model.zero_grad()
    with refused("queries:", "expected loss.backward()"):
        influence_scores(p.kfac, p.model)
    with refused("queries:", "nobody", "expected"):
        influence_scores(p.kfac, p.model, {"nobody": torch.zeros(2)})
    with refused("queries:", "head.weight", "infinity", "expected"):
        influence_scores(p.kfac, p.model, {"head.weight": torch.full_like(p.model.head.weight, float("inf"))})
    with refused("kfac:", "expected"):
        influence_scores(kfac(), p.model, p.queries)
    with refused("scores:", "expected"), influence_scores(p.kfac, p.model, p.queries) as scores:
        _ = scores.values
    influence = Influence(p.kfac, p.model, p.queries)
    p.model.head.weight.requires_grad_(False)
    with refused("queries:", "head.weight", "expected"), gramian.observe(p.model, influence):
        pass


def test_parts_by_token_are_those_of_plain_hooks() -> None:
    """g_tᵀ D a_t of linear layers, D[x_t] · g_t of the table, (x̂_t ⊙ g_t) · d of the norm, from torch's own hooks."""
    p = Problem()
    model, seen = p.model, {}
    influence = Influence(p.kfac, model, p.queries, by="token")
    with gramian.observe(model, influence, loss_reduction="sum") as found:
        loss_of_batch(model, *p.batch).backward()
    hooks = []
    for name, module in model.named_children():

        def note(layer: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            x = args[0].detach()
            output.register_hook(lambda g: seen.__setitem__(name, (x, g)))

        hooks.append(module.register_forward_hook(note))
    loss_of_batch(model, *p.batch).backward()
    total = torch.zeros(5, 2, 4, dtype=torch.float64)
    for name, (x, g) in seen.items():
        module, D = model.get_submodule(name), influence.directions
        for q in range(2):
            if isinstance(module, nn.Linear):
                part = torch.einsum("bto,oi,bti->bt", g, D[f"{name}.weight"][q], x)
                part = part + g @ D[f"{name}.bias"][q] if module.bias is not None else part
            elif isinstance(module, nn.Embedding):
                part = (D[f"{name}.weight"][q][x] * g).sum(2)
            else:
                normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
                part = (normed * g) @ D["norm.weight"][q] + g @ D["norm.bias"][q]
            total[:, q] -= part
    assert_close(found[influence][:, :, :-1], total, 1e-9)
    assert float(found[influence][:, :, -1].abs().max()) == 0
    assert_close(found[influence].sum(2), p.expected_BQ, 1e-8)


def test_parts_by_parameter_add_up_to_the_score() -> None:
    p = Problem()
    with influence_scores(p.kfac, p.model, p.queries, by="parameter", loss_reduction="sum") as scores:
        loss_of_batch(p.model, *p.batch).backward()
    assert_close(scores.values.sum(2), p.expected_BQ, 1e-8)
    place = scores.parameters.index("fc.weight")
    alone = [{name: g if name.startswith("fc") else torch.zeros_like(g) for name, g in q.items()} for q in p.queries]
    with influence_scores(p.kfac, p.model, alone, by="parameter", loss_reduction="sum") as fc:
        loss_of_batch(p.model, *p.batch).backward()
    assert_close(fc.values[:, :, place], scores.values[:, :, place], 1e-9)
    with refused("by: 'layer'; expected one of sample, parameter, token"):
        Influence(p.kfac, p.model, p.queries, by="layer")
