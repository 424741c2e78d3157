"""The tail curve: mass and normaliser at every temperature between its knots, on logits like those of language models."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.data import load_windows
from gramian.distill.cache import TopK
from gramian.distill.cache.topk_cache import GONE, fit_tail, place_knots, places_between
from gramian.distill.loss.head import Head
from gramian.distill.loss.sparse_tail import tail_at
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal
from gramian.models.gpt import GPT, GPTConfig
from gramian.train.config.config import parse_config

pytestmark = pytest.mark.oracle


def zipf_logits(tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Log-frequencies that fall off like a power of the rank, noise of the context, a few candidates on top; float64."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tokens, 1, generator=generator, dtype=torch.float64)

    rank_V = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    noise_NV = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    logits_NV = -uniform(0.5, 2.0) * rank_V.log() + uniform(0.5, 2.5) * noise_NV
    logits_NV[:, :8] += uniform(0.0, 6.0)
    return logits_NV


def encoded(logits_NV: Tensor, kind: TopK):  # type: ignore[no-untyped-def]
    """Through a head that is the identity."""
    vocabulary = logits_NV.shape[1]
    signal = DenseSignal(logits_NV.unsqueeze(0), Head(torch.eye(vocabulary, dtype=logits_NV.dtype)))
    facts = kind.facts(signal.head)
    values, errors = kind.encode(signal, torch.tensor([0]), facts, True)
    return kind.decode(values, {}, facts, None), errors


def worst_error(logits_NV: Tensor, kind: TopK) -> tuple[float, float]:
    """Of the normaliser and of the tail's mass, on a fine grid of temperatures, in float64."""
    stored, _ = encoded(logits_NV, kind)
    logits_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    normaliser = mass = 0.0
    for temperature in torch.linspace(*kind.temperatures, 97, dtype=torch.float64).tolist():
        told_N = tail_at(stored.tail, 1.0 / temperature)[0][0].double()
        kept_NK = stored.logits_BTK[0].double() / temperature
        told_all_N = torch.logaddexp(kept_NK.logsumexp(-1), told_N)
        p_NV = (logits_NV / temperature).log_softmax(-1)
        rest_N = 1.0 - p_NV.gather(-1, stored.ids_BTK[0]).exp().sum(-1)
        normaliser = max(normaliser, float((told_all_N - (logits_NV / temperature).logsumexp(-1)).abs().max()))
        mass = max(mass, float(((told_N - told_all_N).exp() - rest_N).abs().max()))
    return normaliser, mass


@pytest.mark.parametrize(("vocabulary", "k"), [(900, 8), (900, 64), (5000, 16), (5000, 64)])
def test_six_knots_are_within_a_thousandth_of_a_nat(vocabulary: int, k: int) -> None:
    logits_NV = zipf_logits(48, vocabulary, seed=k)
    normaliser, mass = worst_error(logits_NV, TopK(k=k))
    assert normaliser < 1e-3 and mass < 5e-4


@pytest.mark.full
def test_more_knots_are_better_until_the_rounding_of_what_is_kept() -> None:
    logits_NV = zipf_logits(24, 3000)
    errors = [worst_error(logits_NV, TopK(k=16, knots=knots))[1] for knots in (2, 3, 4, 6)]
    assert errors[0] > 4 * errors[1] > 8 * errors[2] and errors[2] > 2 * errors[3]
    wider = worst_error(logits_NV, TopK(k=16, knots=10, temperatures=(0.5, 10.0)))[0]
    assert wider < 3e-3


def test_the_stated_error_is_the_true_one() -> None:
    logits_NV = zipf_logits(32, 2000, seed=4)
    kind = TopK(k=16)
    stated = encoded(logits_NV, kind)[1].worst
    normaliser, mass = worst_error(logits_NV, kind)
    assert normaliser <= 1.05 * stated["log_normaliser"] and stated["log_normaliser"] <= 1.5 * normaliser
    assert mass <= 1.05 * stated["tail_mass"] and stated["tail_mass"] <= 1.5 * mass


@pytest.mark.full
def test_a_trained_model_has_such_logits(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = {"limit_bytes": 200_000, "length": 32, "batch": 8}
    training, _ = load_windows(parse_config({"run": {"folder": str(tmp_path)}, "data": data}).data)
    model = GPT(GPTConfig(vocabulary=training.vocabulary, context=32, layers=2, width=48, heads=2))
    optimizer, drawn = torch.optim.AdamW(model.parameters(), lr=5e-3), np.random.default_rng(0)
    for _ in range(60):
        rows = training.stack(drawn.integers(0, len(training), 16))
        loss = F.cross_entropy(model(rows["tokens"]).flatten(0, 1), rows["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 3.6  # from 5.5
    signal = LiveTeacher(model)(training.stack(np.arange(16)))
    logits_NV = signal.head.logits(signal.hidden_BTD).double().flatten(0, 1)
    for k in (4, 16, 64):
        normaliser, mass = worst_error(logits_NV, TopK(k=k))
        assert normaliser < 1e-3 and mass < 3e-4, k


def test_the_curve_is_the_tails_log_sum_and_its_derivative() -> None:
    logits_NV = zipf_logits(5, 40)
    rest_NV = logits_NV.scatter(-1, logits_NV.topk(7).indices, GONE)
    knots = place_knots(6, 1.0, 5.0)
    values_NQ, slopes_NQ = fit_tail(rest_NV, knots)
    for place, knot in enumerate(knots):
        u = torch.tensor(knot, dtype=torch.float64, requires_grad=True)
        for row in range(5):
            smallest = logits_NV[row].sort().values[:-7]  # all but the seven largest
            value = (u * smallest).exp().sum().log()
            (slope,) = torch.autograd.grad(value, u)
            assert values_NQ[row, place].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-6)
            assert slopes_NQ[row, place].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)


def test_logits_are_relative_to_the_largest_and_shifts_do_not_matter() -> None:
    logits_NV = zipf_logits(6, 100)
    one, _ = encoded(logits_NV, TopK(k=5))
    other, _ = encoded(logits_NV + 1000.0, TopK(k=5))
    assert one.logits_BTK[..., 0].eq(0.0).all() and one.logits_BTK.le(0.0).all()
    assert torch.equal(one.ids_BTK, other.ids_BTK) and torch.equal(one.logits_BTK, other.logits_BTK)
    assert torch.allclose(one.tail.values_BTQ, other.tail.values_BTQ, atol=1e-4)


def test_ids_that_can_never_come_leave_the_curve_finite() -> None:
    logits_NV, bias_V = zipf_logits(6, 100), torch.zeros(100, dtype=torch.float64)
    bias_V[3::2] = -math.inf
    kind, head = TopK(k=60), Head(torch.eye(100, dtype=torch.float64), bias_V)
    values, errors = kind.encode(DenseSignal(logits_NV.unsqueeze(0), head), torch.tensor([0]), kind.facts(head), True)
    assert all(bool(tensor.isfinite().all()) for tensor in values.values())
    assert errors.worst["log_normaliser"] < 1e-3


def test_knots_span_the_temperatures_and_measured_places_lie_between_all_of_them() -> None:
    knots = place_knots(6, 1.0, 5.0)
    assert knots[0] == pytest.approx(0.2) and knots[-1] == 1.0 and knots == sorted(set(knots)) and len(knots) == 6
    places = places_between(knots)
    assert set(knots) <= set(places) and all(
        sum(a < place < b for place in places) == 3 for a, b in zip(knots, knots[1:], strict=False)
    )
