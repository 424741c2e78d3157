"""Properties of the demo's loop, with a made-up observer in place of the statistics."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.models import GPT, GPTConfig
from gramian.statistics import LayerHealth, NoiseScale, NoiseScaleResult
from gramian.train import demo_run
from gramian.train.corpus import Corpus
from gramian.train.demo_observation import HistoryRow, Observation, layer_group, measure_noise
from gramian.train.demo_run import DemoConfig, Progress, run_demo

TINY = GPTConfig(context=16, layers=1, width=16, heads=2)
CONFIG = DemoConfig(model=TINY, batch_size=4, observe_every=3, hold_steps=12)


@pytest.fixture(autouse=True)
def short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "SAMPLE_BYTES", 5)
    monkeypatch.setattr(demo_run, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(demo_run, "NOISE_SEQUENCES", 8)


@pytest.fixture
def corpus() -> Corpus:
    text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog\n" * 50), dtype=torch.uint8)
    return Corpus(text, text, ("fox.py",), ("fox.py",), "digest")


def fake_observer(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, Observation]:
    """Known numbers for every module and parameter."""
    loss = backward()
    modules = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    health = {
        name: LayerHealth(activation_norm=2.0, gradient_norm=1.0, zero_fraction=0.5, nonfinite=1) for name in modules
    }
    traces = {name: float(parameter.numel()) for name, parameter in model.named_parameters()}
    return loss, Observation((1.0, 2.0, 3.0, 4.0), 64.0, 2.0, health, traces)


def test_a_run_is_a_function_of_its_config(corpus: Corpus) -> None:
    first, again = run_demo(CONFIG, corpus, observer=fake_observer), run_demo(CONFIG, corpus, observer=fake_observer)
    other = run_demo(dataclasses.replace(CONFIG, seed=1), corpus, observer=fake_observer)
    assert (first.losses, first.validation, first.sample) == (again.losses, again.validation, again.sample)
    assert first.losses != other.losses


def test_training_lowers_the_loss_and_uses_every_step(corpus: Corpus) -> None:
    steps: list[Progress] = []
    result = run_demo(dataclasses.replace(CONFIG, hold_steps=60), corpus, steps.append, fake_observer)
    assert result.steps == len(result.losses) == len(steps) == 100
    assert result.tokens == 100 * 4 * 16
    assert not result.stopped_early
    assert result.validation_loss < 0.8 * result.validation[0][1]
    assert result.validation_bits_per_byte == pytest.approx(result.validation_loss / math.log(2))
    assert steps[-1].fraction == 1.0


def test_repeating_with_the_recorded_hold_steps_repeats_a_timed_run(corpus: Corpus) -> None:
    timed = run_demo(dataclasses.replace(CONFIG, hold_steps=None, seconds=0.3), corpus, observer=fake_observer)
    again = run_demo(dataclasses.replace(CONFIG, hold_steps=timed.hold_steps), corpus, observer=fake_observer)
    assert timed.losses == again.losses[: timed.steps]
    assert timed.stopped_early or timed.steps == again.steps


def test_observed_steps_are_every_nth_and_the_last(corpus: Corpus) -> None:
    observed: list[int] = []
    done: list[Progress] = []

    def observer(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, Observation]:
        observed.append(len(done))
        return fake_observer(model, backward)

    run_demo(CONFIG, corpus, done.append, observer)
    assert observed == [0, 3, 6, 9, 12, 15, 18, 19]


def test_report_groups_sum_to_the_model(corpus: Corpus) -> None:
    result = run_demo(CONFIG, corpus, observer=fake_observer)
    seen = result.observations
    assert [group.layer for group in seen.groups] == [
        "token_embedding",
        "position_embedding",
        "blocks.0.attention",
        "blocks.0.mlp",
        "final_norm",
        "head",
    ]
    assert sum(group.parameters for group in seen.groups) == result.parameters
    for group in seen.groups:
        assert group.fisher_share == pytest.approx(group.parameters / result.parameters)
    attention = seen.groups[2]
    assert (attention.activation_norm, attention.zero_fraction, attention.nonfinite) == (2.0, 0.5, 3)
    assert attention.gradient_norm == 1.0
    assert [row.step for row in seen.history] == [0, 3, 6, 9, 12, 15, 18, 19]
    assert seen.history[0] == HistoryRow(step=0, median_sample_norm=2.5, trace_covariance=64.0, squared_gradient=2.0)


def make_backward(model: GPT, tokens_BT: Tensor) -> Callable[[], Tensor]:
    def backward() -> Tensor:
        loss = F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return backward


def test_measured_noise_is_that_of_a_loop_over_single_samples() -> None:
    model = GPT(TINY).double()
    tokens_NT = torch.randint(256, (12, 17), generator=torch.Generator().manual_seed(0))
    tokens_NT[:, 1::2] = 7  # something to learn that all samples share, so that the mean gradient stands out
    noise = measure_noise(model, [make_backward(model, part) for part in tokens_NT.split(4)])
    assert all(parameter.grad is None for parameter in model.parameters())

    gradients = []
    for row in tokens_NT.split(1):
        model.zero_grad()
        make_backward(model, row)()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    gradient_NP = torch.stack(gradients)
    trace = gradient_NP.var(dim=0).sum()
    squared = gradient_NP.mean(dim=0).square().sum() - trace / 12
    norms_N = gradient_NP.norm(dim=1)
    assert noise.samples == 12
    assert noise.noise_scale == pytest.approx((trace / squared).item(), rel=1e-9)
    assert noise.sample_norm_quantiles[1] == pytest.approx(norms_N.quantile(0.5).item(), rel=1e-9)
    assert noise.sample_norm_quantiles[3] == pytest.approx(norms_N.max().item(), rel=1e-9)


def test_a_noise_scale_above_the_samples_measured_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(TINY)
    tokens_NT = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    for unbiased in (5.0, -1.0, math.inf, math.nan):
        moments = NoiseScaleResult(4, 1.0, unbiased, 1.0, 1.0)
        monkeypatch.setattr(NoiseScale, "finish", lambda self, sums, moments=moments: moments)
        assert measure_noise(model, [make_backward(model, tokens_NT)]).noise_scale is None


def test_the_real_observer_leaves_the_run_as_it_would_be_without_it(corpus: Corpus) -> None:
    observed, plain = run_demo(CONFIG, corpus), run_demo(CONFIG, corpus, observer=fake_observer)
    assert observed.losses == plain.losses
    seen = observed.observations
    assert sum(group.fisher_share for group in seen.groups) == pytest.approx(1.0)
    assert all(group.gradient_norm > 0.0 and group.nonfinite == 0 for group in seen.groups)
    assert all(row.median_sample_norm > 0.0 for row in seen.history)


def test_a_loss_that_is_not_finite_stops_the_run(corpus: Corpus) -> None:
    def observer(model: GPT, backward: Callable[[], Tensor]) -> tuple[Tensor, Observation]:
        loss, observation = fake_observer(model, backward)
        return loss * math.nan, observation

    with pytest.raises(FloatingPointError, match="loss is nan at step 0"):
        run_demo(CONFIG, corpus, observer=observer)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("head.weight", "head"),
        ("blocks.3.fc", "blocks.3.mlp"),
        ("blocks.3.norm_mlp.bias", "blocks.3.mlp"),
        ("blocks.0.qkv.weight", "blocks.0.attention"),
        ("blocks.0.norm_attention", "blocks.0.attention"),
    ],
)
def test_layer_group(name: str, group: str) -> None:
    assert layer_group(name) == group


def test_learning_rate_warms_up_holds_and_falls(corpus: Corpus) -> None:
    config = dataclasses.replace(CONFIG, hold_steps=60, warmup_steps=10)
    rates = [demo_run._learning_rate(step, 60, config) / config.peak_learning_rate for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:60] == [1.0] * 51
    assert all(later < earlier for earlier, later in zip(rates[59:], rates[60:], strict=False))
    assert 0.0 < rates[-1] < 0.01
