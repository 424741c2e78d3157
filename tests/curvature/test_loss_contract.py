"""What the factors must not depend on: how the loss is averaged, scaled, split and padded; and what they average over time."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramian
from gramian.oracles import dense_kfac
from tests.curvature.problems import (
    IGNORE,
    PROBLEMS,
    Problem,
    assert_close,
    assert_same_factors,
    calls_of,
    classes,
    cross_entropy,
    has_bias,
    kfac,
    normal,
    seeded,
    tokens,
    written,
)
from tests.kit.matrix import examples
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]

NAMES = ("mlp", "mlp_tokens", "gpt", "embedding", "conv1d")
Way = Callable[[Problem, nn.Module, gramian.KFACNaturalGradient], None]


# ---- one loss, many ways to write it ---------------------------------------------------------------------------------


def mean(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    with found.capture(model, num_terms=p.terms):
        p.loss(model, reduction="mean").backward()


def coefficient(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    with found.capture(model, loss_reduction=0.3, num_terms=p.terms):
        (0.3 * p.loss(model)).backward()


def loss_scale(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    with found.capture(model, num_terms=p.terms, loss_scale=1000.0):
        (1000.0 * p.loss(model, reduction="mean")).backward()


def grad_scaler(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with found.capture(model, num_terms=p.terms, loss_scale=scaler):
        scaler.scale(p.loss(model, reduction="mean")).backward()


def duplicated(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    rows = [*range(len(p.inputs))] * 3
    with found.capture(model, num_terms=3 * p.terms):
        p.loss(model, rows, "mean").backward()


def reversed_order(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    with found.capture(model, num_terms=p.terms):
        p.loss(model, [*range(len(p.inputs))][::-1], "mean").backward()


def accumulated(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    """Micro-batches of one sample, each loss a mean divided by their number."""
    samples = len(p.inputs)
    each = p.terms // samples
    with found.capture(model, loss_reduction=1 / (each * samples), num_terms=each) as cap:
        for i in range(samples):
            if i:
                cap.next(num_terms=each)
            (p.loss(model, [i], "mean") / samples).backward()


def one_backward(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    """One backward through two forwards: N is what stands behind the backward."""
    with found.capture(model, num_terms=p.terms):
        ((p.loss(model, slice(0, 1)) + p.loss(model, slice(1, None))) / p.terms).backward()


def all_weights_one(p: Problem, model: nn.Module, found: gramian.KFACNaturalGradient) -> None:
    with found.capture(model, num_terms=p.terms, token_weights=torch.ones(len(p.inputs), 1)):
        p.loss(model, reduction="mean").backward()


WAYS: tuple[Way, ...] = (
    mean, coefficient, loss_scale, grad_scaler, duplicated, reversed_order, accumulated, one_backward, all_weights_one,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_do_not_depend_on_how_the_loss_is_written(way: Way, name: str, sharing: str) -> None:
    p = PROBLEMS[name]
    model, found = p.model(), kfac(weight_sharing=sharing)
    way(p, model, found)
    expected = p.captured(weight_sharing=sharing)
    if way is duplicated:  # as many terms as there were terms
        for block in expected.kfac_factors.values():
            block.facts.terms *= 3
    assert_same_factors(found, expected)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@settings(max_examples=examples(8))
@given(data=st.data())
def test_any_split_into_micro_batches_gives_the_same_factors(name: str, data: st.DataObject) -> None:
    p = PROBLEMS[name]
    samples = len(p.inputs)
    cuts = sorted(data.draw(st.lists(st.integers(0, samples), max_size=4)))
    reduction = data.draw(st.sampled_from(["mean", "sum"]))
    policy = data.draw(st.sampled_from(["all", "small_only"]))
    model, found = p.model(), kfac(kfac_policy=policy)
    with found.capture(model, loss_reduction=reduction, num_terms=0) as cap:
        for start, end in itertools.pairwise([0, *cuts, samples]):
            part = slice(start, end)
            cap.next(num_terms=p.targets[part].numel())
            p.loss(model, part, reduction).backward()
    assert_same_factors(found, p.captured(kfac_policy=policy))


def test_each_backward_has_its_own_terms() -> None:
    p = PROBLEMS["mlp"]
    model, found = p.model(), kfac()
    with found.capture(model, num_terms=5) as cap:
        p.loss(model, slice(0, 5), "mean").backward()
        with refusal(r"expected cap.next\(num_terms=...\) before each further"):
            p.loss(model, slice(5, 8), "mean")
        cap.next(num_terms=3)
        p.loss(model, slice(5, 8), "mean").backward()
    assert_same_factors(found, p.captured())


@pytest.mark.parametrize("value", [None, -1, float("nan"), "8", True])
def test_an_invalid_number_of_terms_is_refused(value: Any) -> None:
    p, found = PROBLEMS["mlp"], kfac(update_freq=2)
    model = p.model()
    with refusal("num_terms: expected"):
        found.capture(model, num_terms=value)
    mean(p, model, found)
    with found.capture(model, num_terms=8) as cap, refusal("num_terms: expected"):
        cap.next(num_terms=value)  # a step that refreshes nothing checks too


# ---- tokens that do not count ----------------------------------------------------------------------------------------


def ignoring(p: Problem) -> Tensor:
    targets = p.targets.clone()
    targets[0, 1:] = IGNORE
    targets[1, 0] = IGNORE
    return targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["seen at the head", "weights"])
def test_ignored_targets_are_not_terms(reduction: str, weighted: bool) -> None:
    p = PROBLEMS["mlp_tokens"]
    model, targets, found = p.model(), ignoring(p), kfac()
    weights = (targets != IGNORE).double()
    terms = int(weights.sum())
    told: dict[str, Any] = {"token_weights": weights} if weighted else {"num_terms": terms}
    with found.capture(model, loss_reduction=reduction, **told):
        cross_entropy(model, p.inputs, targets, reduction).backward()
    calls = calls_of(model, lambda: cross_entropy(model, p.inputs, targets).backward(), p.layers)
    for layer in p.layers:
        module, block = model.get_submodule(layer), found.kfac_factors[layer]
        A, G = dense_kfac.factors(tokens(module, calls[layer]), terms, 1.0, has_bias(module), weights.flatten())
        assert_close(block.A.to_dense(), A, what=f"{layer} A")
        assert_close(block.G.to_dense(), G, what=f"{layer} G")
        assert block.facts.terms == terms


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("policy", ["all", "small_only"])
@pytest.mark.parametrize("told", ["weights", "terms"])
def test_a_padded_batch_is_the_ragged_one(reduction: str, sharing: str, policy: str, told: str) -> None:
    """Causal attention and padding on the right, so that what is padded is seen by nobody."""
    p = PROBLEMS["gpt"]
    lengths = (6, 2, 4)
    model, padded, ragged = p.model(), *(kfac(weight_sharing=sharing, kfac_policy=policy) for _ in range(2))
    targets, weights = p.targets.clone(), torch.zeros(3, 6)
    for i, length in enumerate(lengths):
        targets[i, length:] = IGNORE
        weights[i, :length] = 1
    what = {"token_weights": weights} if told == "weights" else {"num_terms": sum(lengths)}
    with padded.capture(model, loss_reduction=reduction, **what):
        cross_entropy(model, p.inputs, targets, reduction).backward()
    with ragged.capture(model, loss_reduction=reduction, num_terms=0) as cap:
        for i, length in enumerate(lengths):
            cap.next(num_terms=length)
            row = slice(i, i + 1)
            cross_entropy(model, p.inputs[row, :length], p.targets[row, :length], reduction).backward()
    assert_same_factors(padded, ragged)
    assert padded.record()["layers"]["blocks.0.fc"]["N"] == sum(lengths)


class Pooled(nn.Module):
    """A masked mean over tokens between a linear that sees tokens and one that sees samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        h_BTD = torch.tanh(self.inner(x_BTD)) * mask_BT[..., None]
        return self.head(h_BTD.sum(1) / mask_BT.sum(1, keepdim=True))


def test_a_layer_behind_a_pooling_sees_samples() -> None:
    model, x, y, weights = seeded(Pooled), normal(3, 4, 7), classes(5, 3), torch.ones(3, 4).double()
    weights[1, 2:] = weights[2, 1:] = 0
    padded, ragged = kfac(), kfac()
    with padded.capture(model, num_terms=3, token_weights=weights):
        F.cross_entropy(model(x, weights), y).backward()
    with ragged.capture(model, num_terms=0) as cap:
        for i, length in enumerate((4, 2, 1)):
            cap.next(num_terms=1)
            F.cross_entropy(model(x[i : i + 1, :length], torch.ones(1, length)), y[i : i + 1]).backward()
    assert_same_factors(padded, ragged)


@pytest.mark.parametrize("name", ["gpt", "mlp_tokens", "embedding"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sample_of_weight_k_is_that_sample_k_times(name: str, sharing: str, reduction: str) -> None:
    p = PROBLEMS[name]
    times = torch.tensor([2, 0, 3, 1])[: len(p.inputs)]
    model, weighted, repeated = p.model(), *(kfac(weight_sharing=sharing) for _ in range(2))
    w_BT = times.double()[:, None].expand(p.targets.shape)
    with weighted.capture(model, loss_reduction=reduction, token_weights=w_BT):
        logits = model(p.inputs).flatten(0, 1)
        loss = (F.cross_entropy(logits, p.targets.flatten(), reduction="none") * w_BT.flatten()).sum()
        (loss / w_BT.sum() if reduction == "mean" else loss).backward()
    rows = torch.arange(len(times)).repeat_interleave(times)
    with repeated.capture(model, loss_reduction=reduction, num_terms=p.targets[rows].numel()):
        p.loss(model, rows, reduction).backward()
    assert_same_factors(weighted, repeated)


def test_fractional_weights_are_those_of_the_terms() -> None:
    p = PROBLEMS["mlp_tokens"]  # every token by itself
    model, found = p.model(), kfac()
    w_BT = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)).double() + 0.5

    def loss() -> Tensor:
        terms = F.cross_entropy(model(p.inputs).flatten(0, 1), p.targets.flatten(), reduction="none")
        return (terms * w_BT.flatten()).sum()

    with found.capture(model, loss_reduction="sum", token_weights=w_BT):
        loss().backward()
    calls = calls_of(model, lambda: loss().backward(), p.layers)
    for layer in p.layers:
        module, block = model.get_submodule(layer), found.kfac_factors[layer]
        A, G = dense_kfac.factors(
            tokens(module, calls[layer]), float(w_BT.sum()), 1.0, has_bias(module), w_BT.flatten()
        )
        assert_close(block.A.to_dense(), A, what=f"{layer} A")
        assert_close(block.G.to_dense(), G, what=f"{layer} G")


@pytest.mark.parametrize(
    "weights, message",
    [
        (torch.ones(3, 5), r"token_weights: .* sees 6 tokens per sample, the weights have 5; expected shape \[3, 6\]"),
        (torch.ones(6, 3), r"token_weights: expected shape \[3, T\], got \[6, 3\]"),
        (torch.ones(18), r"token_weights: expected shape \[3, T\], got \[18\]"),
        (torch.ones(3, 1, 6), r"token_weights: expected shape \[3, T\]"),
        ([[1.0] * 6] * 3, "token_weights: expected a tensor"),
        (1.0 - torch.eye(3).repeat(1, 2) * 2, "token_weights: contain a negative number, NaN"),
        (torch.full((3, 6), float("nan")), "token_weights: contain a negative number, NaN"),
    ],
    ids=["too few", "sequence first", "flat", "4-D mask", "list", "negative", "nan"],
)
def test_invalid_weights_are_refused(weights: Any, message: str) -> None:
    p = PROBLEMS["gpt"]
    model, found = p.model(), kfac()
    with refusal(message), found.capture(model, token_weights=weights, num_terms=18):
        p.loss(model, reduction="mean").backward()
    assert not found.kfac_factors
    mean(p, model, found)  # the object goes on
    assert_same_factors(found, p.captured())


# ---- averages over refreshes -----------------------------------------------------------------------------------------


class Late(nn.Module):
    """`late` and its norm take part only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.norm, self.head = (
            nn.Linear(20, 30),
            nn.Linear(30, 30),
            nn.LayerNorm(30),
            nn.Linear(30, 25),
        )
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(self.norm(self.late(h)) if self.on else h)


def refresh(model: nn.Module, found: gramian.KFACNaturalGradient, seed: int, count: int) -> None:
    with found.capture(model, num_terms=count):
        F.cross_entropy(model(normal(count, 20, seed=seed)), classes(25, count, seed=seed)).backward()


@pytest.mark.parametrize("count", [3, 40], ids=["low rank", "dense"])
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.95])
def test_factors_are_debiased_averages_over_refreshes(count: int, decay: float) -> None:
    model, found = seeded(Late), kfac(ema_decay=decay)
    alone: list[dict[str, Tensor]] = []
    for k in range(1, 5):
        single = kfac()
        refresh(model, single, k, count)
        alone.append(written(single))
        refresh(model, found, k, count)
        shares = [decay ** (k - j) * (1 - decay) / (1 - decay**k) for j in range(1, k + 1)]
        assert sum(shares) == pytest.approx(1)
        for key, got in written(found).items():
            assert_close(got, sum(share * one[key] for share, one in zip(shares, alone, strict=True)), what=key)
        if k == 1:
            assert all(torch.equal(got, alone[0][key]) for key, got in written(found).items())
    kind = "low rank" if count == 3 else "dense"
    assert {f.kind for name in ("first", "late", "head") for f in found.kfac_factors[name].factors.values()} == {kind}
    assert found.record()["layers"]["late"]["refreshes"] == (4 if decay else 1)


def test_a_layer_that_comes_late_counts_its_own_refreshes() -> None:
    model, found, decay = seeded(Late), kfac(ema_decay=0.6), 0.6
    alone = []
    for k, on in enumerate([False, True, False, True]):
        model.on = on
        single = kfac()
        refresh(model, single, k, 5)
        refresh(model, found, k, 5)
        alone.append(written(single))
    record, got = found.record()["layers"], written(found)
    assert [record[name]["refreshes"] for name in ("first", "late", "norm.weight")] == [4, 2, 2]
    share = (1 - decay) / (1 - decay**2)
    for key in ("late A", "late G", "norm.weight G"):
        assert_close(got[key], (1 - share) * alone[1][key] + share * alone[3][key], what=key)


@pytest.mark.parametrize(
    "first, second", [("empirical", "true"), ("true", "empirical"), ("mc", "true"), ("mc", "empirical")]
)
@pytest.mark.parametrize("count", [3, 40], ids=["low rank", "dense"])
def test_the_average_starts_anew_where_the_kind_of_estimate_changes(first: str, second: str, count: int) -> None:
    model, found, alone = seeded(Late), kfac(ema_decay=0.6), kfac()
    batch = (normal(count, 20), classes(25, count))
    found.collect_kfac_factors(model, batch, first)
    found.collect_kfac_factors(model, batch, second, generator=torch.Generator().manual_seed(1))
    alone.collect_kfac_factors(model, batch, second, generator=torch.Generator().manual_seed(1))
    head = found.record()["layers"]["head"]
    assert (head["refreshes"], head["estimate"]) == (1, "exact softmax" if second == "true" else second)
    for side, factor in alone.kfac_factors["head"].factors.items():
        assert_close(found.kfac_factors["head"].factors[side].to_dense(), factor.to_dense())


# ---- which steps refresh ---------------------------------------------------------------------------------------------


def refreshed(found: gramian.KFACNaturalGradient, model: nn.Module, seed: int, force: bool = False) -> bool:
    """One step; whether it made factors."""
    before = found.refreshes
    with found.capture(model, num_terms=3, force=force):
        F.cross_entropy(model(normal(3, 20, seed=seed)), classes(25, 3, seed=seed)).backward()
    return found.refreshes > before


def test_the_first_step_refreshes_and_then_every_nth() -> None:
    model, found = seeded(Late), kfac(update_freq=3)
    assert [refreshed(found, model, step) for step in range(8)] == [True, False, False] * 2 + [True, False]
    assert (found.steps, found.refreshes) == (8, 3)


def test_a_forced_step_refreshes_at_once_and_the_count_starts_there() -> None:
    model, found = seeded(Late), kfac(update_freq=3)
    steps = [refreshed(found, model, step, force=step == 4) for step in range(9)]
    assert [i for i, made in enumerate(steps) if made] == [0, 3, 4, 7]


def test_captures_and_collections_are_steps_alike() -> None:
    model, found = seeded(Late), kfac(update_freq=2)
    batch = (normal(3, 20), classes(25, 3))
    found.collect_kfac_factors(model, batch)
    assert not refreshed(found, model, 1)
    assert refreshed(found, model, 2)
    before = written(found)
    found.collect_kfac_factors(model, batch)
    assert all(torch.equal(got, before[key]) for key, got in written(found).items())
    found.collect_kfac_factors(model, batch, force=True)
    assert (found.steps, found.refreshes) == (5, 3)


def test_a_step_without_a_refresh_leaves_the_model_alone() -> None:
    model, found = seeded(Late), kfac(update_freq=5)
    assert refreshed(found, model, 0)
    with found.capture(model, num_terms=3):
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_dropped_refresh_is_tried_again_at_the_next_step() -> None:
    model, found = seeded(Late), kfac(update_freq=3)
    assert refreshed(found, model, 0)
    before = written(found)
    bad = normal(3, 20)
    bad[1, 2] = float("nan")
    made = []
    for step in range(1, 7):
        count = found.refreshes
        with found.capture(model, num_terms=3):
            F.cross_entropy(model(bad if step in (3, 4) else normal(3, 20, seed=step)), classes(25, 3)).backward()
        made.append(found.refreshes > count)
        if step == 4:
            assert all(torch.equal(got, before[key]) for key, got in written(found).items())
    assert made == [False, False, False, False, True, False]
    assert [drop["step"] for drop in found.record()["dropped"]] == [3, 4]
    assert "not finite" in found.record()["dropped"][0]["reason"]


def test_strict_raises_where_a_refresh_is_dropped() -> None:
    model, found = seeded(Late), kfac(strict=True)
    with refusal("not finite"), found.capture(model, num_terms=3):
        F.cross_entropy(model(torch.full((3, 20), float("nan")).double()), classes(25, 3)).backward()


def test_a_capture_that_cannot_be_entered_leaves_the_object_usable() -> None:
    model, found, other = seeded(Late), kfac(), kfac()
    with other.capture(model, num_terms=3, batch_size=3):
        with refusal("batch_size"), found.capture(model, num_terms=3, batch_size=4):
            pass
        F.cross_entropy(model(normal(3, 20)), classes(25, 3)).backward()
    assert refreshed(found, model, 0)
