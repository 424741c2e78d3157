"""The diagonal Fisher against squares of gradients from single backward passes, per sample and per token."""

import itertools
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gramian
from tests.kit.matrix import sample
from tests.kit.models import CASES
from tests.oracles import sample_statistics
from tests.statistics.problems import INDEPENDENT_TOKENS, assert_tensors, problem, token_fisher

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

MATRIX = [*itertools.product(CASES, ("mean", "sum"), (torch.float64, torch.float32))]


@pytest.mark.parametrize("name, reduction, dtype", sample(MATRIX, 30))
def test_the_diagonal_is_the_mean_of_squared_sample_gradients(name: str, reduction: str, dtype: torch.dtype) -> None:
    p = problem(name, 4, dtype)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher, loss_reduction=reduction) as seen:
        p.backward(model, p.batch, reduction)
    # A square doubles the relative error of what is squared.
    assert_tensors(seen[fisher], p.fisher(), 4 * p.tolerance)
    assert all(value.dtype == dtype for value in seen[fisher].values())


@pytest.mark.parametrize("name", ["tied_gpt", "tied_linears", "reused", "hf_gpt2"])
def test_uses_of_one_parameter_are_joined_before_they_are_squared(name: str) -> None:
    p = problem(name, 4)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.batch)
    shared = {"tied_gpt": "tokens.weight", "tied_linears": "left.weight", "reused": "shared.weight"}
    key = shared.get(name, "transformer.wte.weight")
    assert seen.coverage[key].uses == (3 if name == "reused" else 2)
    assert_tensors({key: seen[fisher][key]}, {key: p.fisher()[key]}, p.tolerance)


@pytest.mark.parametrize("name", INDEPENDENT_TOKENS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_per_token_squares_are_those_of_a_loop_over_tokens(name: str, reduction: str) -> None:
    p = problem(name, 3)
    model, fisher = p.model(), gramian.DiagonalFisher(per="token")
    with gramian.observe(model, fisher, loss_reduction=reduction) as seen:
        p.backward(model, p.batch, reduction)
    assert_tensors(seen[fisher], token_fisher(name, 3), p.tolerance)


class _Unrolled(nn.Module):
    """`networks.Reused` with a layer of its own for each of the three uses."""

    def __init__(self, reused: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = reused.inner, reused.head
        self.uses = nn.ModuleList(deepcopy(reused.shared) for _ in range(3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.inner(x_BTD)
        for use in self.uses:
            x_BTD = x_BTD + torch.tanh(use(x_BTD))
        return self.head(x_BTD)


def test_per_token_every_use_is_squared_by_itself() -> None:
    p = problem("reused", 3)
    model, fisher = p.model(), gramian.DiagonalFisher(per="token")
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.batch)
    tokens = tuple(t.flatten(0, 1)[:, None] for t in p.batch)
    squares = sample_statistics.diagonal_fisher(_Unrolled(p.model()), partial(p.case.loss, reduction="sum"), tokens)
    for local in ("weight", "bias"):
        uses = sum(squares[f"uses.{use}.{local}"] for use in range(3)) / 6**2 / 3
        assert_tensors({local: seen[fisher][f"shared.{local}"]}, {local: uses}, p.tolerance)


def test_a_sample_of_one_token_has_the_same_fisher_per_token_and_per_sample() -> None:
    p = problem("mlp", 5)
    model, fisher = p.model(), gramian.DiagonalFisher(per="token")
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.batch)
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)


@pytest.mark.parametrize("name", ["conv2d", "conv1d"])
def test_layers_without_tokens_count_the_whole_sample_as_one(name: str) -> None:
    p = problem(name, 3)
    model, fisher = p.model(), gramian.DiagonalFisher(per="token")
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.batch)
    for key in ("0.weight", "2.weight"):
        assert_tensors({key: seen[fisher][key]}, {key: p.fisher()[key]}, p.tolerance)


def test_unused_parameters_are_zero_and_frozen_ones_are_absent() -> None:
    p = problem("unused", 3)
    model, fisher = p.model(), gramian.DiagonalFisher()
    model.used.bias.requires_grad_(False)
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.batch)
    assert set(seen[fisher]) == {"used.weight", "spare.weight", "spare.bias"}
    assert not seen[fisher]["spare.weight"].any()
    assert seen.coverage["spare.weight"].status == "unused"
    assert seen.coverage["used.bias"].status == "frozen"


def test_units_replace_samples_in_squares_and_count() -> None:
    p = problem("gpt", 5)
    model, fisher, ids = p.model(), gramian.DiagonalFisher(), torch.tensor([1, 0, 1, 2, 0])
    with gramian.observe(model, fisher, loss_reduction="sum", sample_ids=ids) as seen:
        p.backward(model, p.batch, "sum")
    units = {key: torch.stack([g[ids == u].sum(0) for u in range(3)]) for key, g in p.gradients.items()}
    assert_tensors(seen[fisher], {key: g.square().mean(0) for key, g in units.items()}, p.tolerance)


def test_the_loss_scale_is_undone() -> None:
    p = problem("gpt", 3)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher, loss_scale=1024.0) as seen:
        (1024.0 * p.case.loss(model, *p.batch, reduction="mean")).backward()
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_of_narrow_models_are_summed_in_float32(dtype: torch.dtype) -> None:
    # 600 equal samples: a narrow sum of their squares would be rounded to three digits, or stop growing.
    model, fisher = nn.Linear(3, 2, bias=False).to(dtype), gramian.DiagonalFisher()
    x = torch.full((600, 3), 0.3, dtype=dtype)
    with gramian.observe(model, fisher, loss_reduction="sum") as seen:
        model(x).sum().backward()
    assert seen[fisher]["weight"].dtype == torch.float32
    torch.testing.assert_close(seen[fisher]["weight"], x[:2].float().square(), rtol=1e-6, atol=0)


def test_chunks_of_samples_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramian.plan.norm_algorithm.CHUNK_ELEMENTS", 200)
    for name in ("gpt", "tied_gpt", "convnet"):
        p = problem(name, 5)
        model, fisher = p.model(), gramian.DiagonalFisher()
        with gramian.observe(model, fisher) as seen:
            p.backward(model, p.batch)
        assert_tensors(seen[fisher], p.fisher(), p.tolerance)


def test_another_word_is_refused() -> None:
    with pytest.raises(gramian.GramianError, match='per: expected "sample" or "token", got "batch"'):
        gramian.DiagonalFisher(per="batch")


def test_results_do_not_change_when_they_are_read_or_written_to() -> None:
    p = problem("mlp", 4)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher) as seen:
        p.backward(model, p.rows(slice(0, 2)))
        first: dict[str, Tensor] = seen[fisher]
        for value in first.values():
            value.zero_()
        p.backward(model, p.rows(slice(2, 4)))
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)
