"""Several statistics on one backward: the same results as alone, and nothing is computed twice."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.taps.gradients import Outer, outer
from tests.kit.matrix import some
from tests.kit.models import CASES
from tests.statistics.problems import assert_noise, assert_norms, assert_tensors, problem

pytestmark = pytest.mark.few_proofs


class _Counted(torch.autograd.Function):
    """Identity that counts its backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _Counted.calls += 1
        return g


@pytest.fixture
def grams(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Gram matrices were computed."""
    counts: Counter[str] = Counter()
    compute = outer.gram_squares_of_layers

    def counted(layers: Any) -> Any:
        counts["grams"] += len(layers)
        return compute(layers)

    monkeypatch.setattr(outer, "gram_squares_of_layers", counted)
    return counts


@pytest.mark.oracle
@pytest.mark.parametrize("name", some(CASES, 1))
def test_all_together_are_those_of_the_loop(name: str) -> None:
    p = problem(name, 4)
    model = p.model()
    norms, fisher, noise, health = (
        gramian.PerSampleNorms(), gramian.DiagonalFisher(), gramian.NoiseScale(), gramian.Health(),
    )  # fmt: skip
    with gramian.observe(model, health, fisher, norms, noise) as seen:
        p.backward(model, p.batch)
    assert_norms(seen[norms].values, p.norms(), p.tolerance)
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)
    assert_noise(seen[noise], p.noise(), 4, p.tolerance)
    assert all(layer.nonfinite == 0 for layer in seen[health].values())


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "reused", "convnet"])
def test_nested_captures_are_those_of_the_loop(name: str) -> None:
    p = problem(name, 4)
    model, fisher, noise = p.model(), gramian.DiagonalFisher(), gramian.NoiseScale()
    with (
        gramian.per_sample_norms(model) as norms,
        gramian.observe(model, fisher) as outer,
        gramian.observe(model, noise) as inner,
    ):
        p.backward(model, p.batch)
    assert_norms(norms.values, p.norms(), p.tolerance)
    assert_tensors(outer[fisher], p.fisher(), p.tolerance)
    assert_noise(inner[noise], p.noise(), 4, p.tolerance)


@pytest.mark.oracle
def test_a_capture_sees_the_passes_of_its_own_block_only() -> None:
    p = problem("gpt", 6)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.rows(slice(0, 1)))
        with gramian.observe(model, fisher) as seen:
            p.backward(model, p.rows(slice(1, 4)))
        p.backward(model, p.rows(slice(4, 6)))
    assert_norms(norms.values, p.norms(), p.tolerance)
    assert_tensors(seen[fisher], p.fisher(slice(1, 4)), p.tolerance)


@pytest.mark.oracle
def test_nested_captures_may_read_the_samples_differently() -> None:
    p = problem("tied_gpt", 4)
    model, ids = p.model(), torch.tensor([0, 1, 1, 0])
    with (
        gramian.per_sample_norms(model, "sum") as rows,
        gramian.per_sample_norms(model, "sum", sample_ids=ids) as units,
        gramian.per_sample_norms(model, 0.5) as halves,
    ):
        p.backward(model, p.batch, "sum")
    joined = [torch.cat([g[ids == u].sum(0).flatten() for g in p.gradients.values()]).norm() for u in range(2)]
    assert_norms(rows.values, p.norms(), p.tolerance)
    assert_norms(units.values, torch.stack(joined), p.tolerance)
    assert_norms(halves.values, 2 * p.norms(), p.tolerance)


def test_one_forward_and_one_backward_run_however_many_statistics() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.forwards = nn.Linear(4, 6), nn.Linear(6, 2), 10

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            return self.second(_Counted.apply(self.first(x).tanh()))

    model = Model()
    with (
        gramian.per_sample_norms(model),
        gramian.observe(model, gramian.DiagonalFisher(), gramian.DiagonalFisher("token"), gramian.NoiseScale()),
        gramian.observe(model, gramian.Health()),
    ):
        model(torch.randn(3, 5, 4)).square().mean((1, 2)).mean().backward()
        assert model.forwards == 11  # the runs of the proof leave no trace
        _Counted.calls = 0
        model(torch.randn(3, 5, 4)).square().mean((1, 2)).mean().backward()
    assert (model.forwards, _Counted.calls) == (12, 1)


def _wide_model() -> nn.Module:
    """Two layers for which the Gram form is the cheaper one at T = 3."""
    return nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 20)).double()


@pytest.mark.parametrize("statistics", [1, 2, 4])
def test_grams_are_computed_once_for_all_statistics_of_a_capture(statistics: int, grams: Counter[str]) -> None:
    model = _wide_model()
    wanted = [gramian.PerSampleNorms(), gramian.NoiseScale(), gramian.PerSampleNorms("gram"), gramian.PerSampleNorms()]
    with gramian.observe(model, *wanted[:statistics], proof="off"):
        model(torch.randn(3, 3, 20, dtype=torch.float64)).square().mean((1, 2)).mean().backward()
    assert grams == {"grams": 2}


def test_grams_are_computed_once_for_nested_captures(grams: Counter[str]) -> None:
    model = _wide_model()
    with (
        gramian.per_sample_norms(model, proof="off"),
        gramian.per_sample_norms(model, 0.5, proof="off"),
        gramian.observe(model, gramian.NoiseScale(), proof="off"),
    ):
        model(torch.randn(3, 3, 20, dtype=torch.float64)).square().mean((1, 2)).sum().backward()
    assert grams == {"grams": 2}


def test_no_gram_is_computed_where_nobody_asks_for_norms(grams: Counter[str]) -> None:
    model = _wide_model()
    with gramian.observe(model, gramian.Health(), gramian.DiagonalFisher(), proof="off"):
        model(torch.randn(3, 3, 20, dtype=torch.float64)).square().mean((1, 2)).mean().backward()
    assert not grams


def test_norms_of_a_parameter_are_formed_once_for_all_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[tuple[int, ...]] = Counter()
    compute = Outer.squared_norms

    def counted(self: Outer, choice: str = "auto") -> Tensor:
        calls[self.shape] += 1
        return compute(self, choice)

    monkeypatch.setattr(Outer, "squared_norms", counted)
    model = _wide_model()
    with gramian.observe(model, gramian.PerSampleNorms(), gramian.NoiseScale(), gramian.PerSampleNorms(), proof="off"):
        model(torch.randn(3, 3, 20, dtype=torch.float64)).square().mean((1, 2)).mean().backward()
    assert calls == {(24, 20): 1, (20, 24): 1}


def test_the_same_statistic_twice_is_refused_by_name() -> None:
    p = problem("mlp", 4)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with pytest.raises(gramian.GramianError, match="twice"), gramian.observe(model, fisher, fisher):
        p.backward(model, p.batch)
    with gramian.observe(model, fisher) as seen:
        with pytest.raises(gramian.GramianError, match="DiagonalFisher"), gramian.observe(model, fisher):
            p.backward(model, p.batch)
        p.backward(model, p.batch)
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)


def test_the_same_capture_twice_is_refused_and_the_first_one_goes_on() -> None:
    p = problem("mlp", 4)
    model = p.model()
    norms = gramian.per_sample_norms(model)
    with norms:
        with pytest.raises(gramian.GramianError, match="was entered before"), norms:
            pass
        p.backward(model, p.batch)
    assert_norms(norms.values, p.norms(), p.tolerance)
    with pytest.raises(gramian.GramianError, match="was entered before"), norms:
        pass


@pytest.mark.oracle
def test_one_statistic_on_two_models_at_once_or_in_turn_keeps_them_apart() -> None:
    p, q = problem("mlp", 4), problem("gpt", 3)
    fisher, first, second = gramian.DiagonalFisher(), p.model(), q.model()
    for _ in range(2):
        with gramian.observe(first, fisher) as left:
            p.backward(first, p.batch)
        with gramian.observe(second, fisher) as right:
            q.backward(second, q.batch)
        assert_tensors(left[fisher], p.fisher(), p.tolerance)
        assert_tensors(right[fisher], q.fisher(), q.tolerance)


def test_a_statistic_that_is_not_part_of_the_capture_is_refused() -> None:
    model = _wide_model()
    with gramian.observe(model, gramian.Health()) as seen:
        model(torch.randn(3, 3, 20, dtype=torch.float64)).sum().backward()
    with pytest.raises(gramian.GramianError, match="statistic: NoiseScale"):
        _ = seen[gramian.NoiseScale()]
    with pytest.raises(gramian.GramianError, match="expected at least one"):
        gramian.observe(model)
