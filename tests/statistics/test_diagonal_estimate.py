"""The running diagonal Fisher against squares of gradients from single backward passes, and its groups, tokens and rows."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

import gramian
from gramian.oracles import single_sample
from gramian.statistics import DiagonalFisherEstimate, RowTraces, TokenTraces, by_column, by_head, by_row
from tests.kit.matrix import FULL, sample
from tests.kit.models import CASES
from tests.kit.processes import distributed
from tests.statistics.problems import INDEPENDENT_TOKENS, Problem, assert_tensors, problem, splits, token_fisher

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

SAMPLES = 6
quick = settings(max_examples=15 if FULL else 5)


def loop(p: Problem, index: Any = slice(None)) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """diag F and its standard error over samples, from the loop's gradients."""
    squares = {name: g[index].square() for name, g in p.gradients.items()}
    n = len(next(iter(squares.values())))
    return {k: s.mean(0) for k, s in squares.items()}, {k: s.std(0) / n**0.5 for k, s in squares.items()}


def run(p: Problem, parts: list[Any], reduction: str = "mean", **options: Any) -> DiagonalFisherEstimate:
    """One capture for every part of the samples."""
    estimate, model = DiagonalFisherEstimate(**options), p.model()
    for rows in parts:
        with estimate.capture(model, loss_reduction=reduction):
            p.backward(model, p.rows(rows), reduction)
    return estimate


def assert_loop(estimate: DiagonalFisherEstimate, p: Problem, samples: int = SAMPLES) -> None:
    tolerance = max(1e-10, 4 * p.tolerance if p.case.computes_in_float32 or p.dtype != torch.float64 else 0)
    mean, error = loop(p)
    assert estimate.samples == samples
    assert_tensors(estimate.diagonal(), mean, tolerance)
    assert_tensors(estimate.standard_error(), error, 4 * tolerance)


NAMES = [*CASES] if FULL else ["mlp", "tied_gpt", "convnet", "padded_embedding", "rmsnorm", "reused", "conv1d"]


@pytest.mark.parametrize("name, reduction", sample([*itertools.product(NAMES, ("mean", "sum"))], len(NAMES)))
def test_mean_and_standard_error_are_those_of_the_loop_over_samples(name: str, reduction: str) -> None:
    p = problem(name, SAMPLES)
    assert_loop(run(p, splits([4, 2]), reduction), p)


def test_two_samples_and_two_parameters_by_hand() -> None:
    """Gradients 1, 3 and 2, 2: squares 1, 9 and 4, 4. The batch's mean gradient is 2, 2: its square would be 4, 4."""
    model, estimate = nn.Linear(2, 1, bias=False, dtype=torch.float64), DiagonalFisherEstimate()
    with estimate.capture(model):
        model(torch.tensor([[1.0, 2.0], [3.0, 2.0]], dtype=torch.float64)).mean().backward()
    assert estimate.diagonal()["weight"].tolist() == [[5.0, 4.0]]
    assert estimate.standard_error()["weight"].tolist() == [[4.0, 0.0]]


@st.composite
def partitions(draw: st.DrawFn) -> list[int]:
    """Sizes of parts, zeros allowed, that add up to all samples."""
    cuts = sorted(draw(st.lists(st.integers(0, SAMPLES), max_size=4)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, SAMPLES], strict=True)]


@pytest.mark.parametrize("name", ["tied_gpt", "mlp", "unused"] if FULL else ["tied_gpt"])
@quick
@given(parts=partitions(), order=st.permutations(range(SAMPLES)), cut=st.integers(0, 5))
def test_any_split_over_backwards_captures_and_estimates_is_one_pass(
    name: str, parts: list[int], order: list[int], cut: int
) -> None:
    p = problem(name, SAMPLES)
    rows = [order[part] for part in splits(parts)]
    left, model = DiagonalFisherEstimate(), p.model()
    if rows[:cut]:
        with left.capture(model):  # several backwards in one capture
            for part in rows[:cut]:
                p.backward(model, p.rows(part))
    right = run(p, rows[cut:])  # a capture each
    left.merge(right)  # as other processes would be joined
    assert_loop(left, p)


def test_a_batch_repeated_changes_nothing_but_the_error() -> None:
    p = problem("mlp", SAMPLES)
    once, often = run(p, [slice(None)]), run(p, [slice(None)] * 5)
    assert_tensors(often.diagonal(), once.diagonal(), 1e-12)
    narrower = ((SAMPLES - 1) / (5 * SAMPLES - 1)) ** 0.5
    assert_tensors(often.standard_error(), {k: v * narrower for k, v in once.standard_error().items()}, 1e-10)


@pytest.mark.parametrize("name", ["linear_3d", "padded_embedding"])
def test_per_token_squares_are_those_of_a_loop_over_tokens(name: str) -> None:
    p = problem(name, 3)
    estimate = run(p, splits([2, 1]), per="token")
    assert_tensors(estimate.diagonal(), token_fisher(name, 3), 1e-10)
    apart = [run(p, [[i]], per="token").diagonal() for i in range(3)]
    error = {k: torch.stack([one[k] for one in apart]).std(0) / 3**0.5 for k in apart[0]}
    assert_tensors(estimate.standard_error(), error, 1e-10)


class Gated(nn.Module):
    """A branch that only some batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x_BI: Tensor, both: bool) -> Tensor:
        return self.always(x_BI) + self.sometimes(x_BI) if both else self.always(x_BI)


def test_samples_that_do_not_use_a_parameter_count_with_zero() -> None:
    torch.manual_seed(0)
    model, estimate, x = Gated().double(), DiagonalFisherEstimate(), torch.randn(5, 3, dtype=torch.float64)
    with estimate.capture(model, loss_reduction="sum"):
        for rows, both in ((slice(0, 2), True), (slice(2, 5), False)):
            model(x[rows], both).square().sum().backward()
    squares = torch.zeros(5, 2, 3, dtype=torch.float64)
    squares[:2] = (2 * model(x[:2], True)[:, :, None] * x[:2, None, :]).square().detach()
    assert_tensors(
        {"mean": estimate.diagonal()["sometimes.weight"], "error": estimate.standard_error()["sometimes.weight"]},
        {"mean": squares.mean(0), "error": squares.std(0) / 5**0.5},
        1e-10,
    )


def test_a_parameter_that_trains_from_some_capture_on_has_samples_of_its_own() -> None:
    p = problem("mlp", SAMPLES)
    estimate, model = DiagonalFisherEstimate(), p.model()
    late = next(name for name, _ in model.named_parameters())
    model.get_parameter(late).requires_grad_(False)
    for part in (slice(0, 4), slice(4, 6)):
        with estimate.capture(model):
            p.backward(model, p.rows(part))
        model.get_parameter(late).requires_grad_(True)
    whole, tail = loop(p), loop(p, slice(4, 6))
    assert_tensors(estimate.diagonal(), {k: (tail if k == late else whole)[0][k] for k in estimate.diagonal()}, 1e-10)
    assert_tensors(
        estimate.standard_error(), {k: (tail if k == late else whole)[1][k] for k in estimate.diagonal()}, 1e-10
    )


# ---- storage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_tiny_and_huge_squares_are_neither_floored_nor_clamped(scale: float) -> None:
    """Squares of 1e-40 in a float32 model: below float16's range, near the end of float32's, and their squares far below."""
    x = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    model, estimate = nn.Linear(3, 3, bias=False), DiagonalFisherEstimate()  # square, as a matrix would be
    with estimate.capture(model, loss_reduction="sum"):
        (model(x) * scale).sum().backward()
    want = torch.tensor([[5.0, 4.0, 0.0]], dtype=torch.float64).expand(3, 3) * scale**2
    torch.testing.assert_close(estimate.diagonal()["weight"], want, rtol=1e-6, atol=0)
    error = torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64).expand(3, 3) * scale**2
    torch.testing.assert_close(estimate.standard_error()["weight"], error, rtol=1e-6, atol=0)
    assert not estimate.diagonal()["weight"][:, 2].any()


def test_half_precision_is_refused_as_storage() -> None:
    estimate = run(problem("mlp", SAMPLES), [slice(None)], ema_decay=0.5)
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        for read in (estimate.diagonal, estimate.moving_average):
            with pytest.raises(gramian.GramianError, match=r"^dtype: expected torch.float32 or torch.float64"):
                read(dtype=dtype)
    assert all(t.dtype == torch.float32 for t in estimate.diagonal(torch.float32).values())


def test_the_moving_average_over_captures_is_debiased_and_weighted_by_samples() -> None:
    p, parts = problem("mlp", SAMPLES), splits([3, 1, 2])
    estimate = run(p, parts, ema_decay=0.9)
    first = run(p, parts[:1], ema_decay=0.99)
    assert_tensors(first.moving_average(), loop(p, parts[0])[0], 1e-10)  # not a hundred times as much
    weights = [0.81 * 3, 0.9 * 1, 2]
    means = [{k: g[rows].square().mean(0) for k, g in p.gradients.items()} for rows in parts]
    want = {k: sum(w * m[k] for w, m in zip(weights, means, strict=True)) / sum(weights) for k in means[0]}
    assert_tensors(estimate.moving_average(), want, 1e-10)
    assert_tensors(estimate.diagonal(), loop(p)[0], 1e-10)


def test_a_capture_that_is_not_finite_is_left_out_as_a_whole() -> None:
    p = problem("mlp", SAMPLES)
    estimate, model = run(p, [slice(None)]), p.model()
    x, y = p.rows(slice(0, 2))
    with estimate.capture(model):
        p.backward(model, (x * float("inf"), y))
    assert estimate.dropped == 1
    assert_loop(estimate, p)


@pytest.mark.parametrize("parts", [[slice(None)], [slice(0, 1), slice(1, 2)]])
def test_squares_whose_deviations_are_no_numbers_are_left_out(parts: list[slice]) -> None:
    """Gradients of 1e90 have squares of 1e180, which are numbers, and deviations of 1e360, which are none."""
    model, estimate = nn.Linear(2, 1, bias=False, dtype=torch.float64), DiagonalFisherEstimate()
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0]], dtype=torch.float64)
    for scale in (1.0, 1e90):
        for part in parts if scale > 1 else [slice(None)]:
            with estimate.capture(model, loss_reduction="sum"):
                model(x[part] * scale).sum().backward()
    assert estimate.dropped == len(parts) and estimate.samples == 2
    assert estimate.diagonal()["weight"].tolist() == [[5.0, 4.0]]
    assert estimate.standard_error()["weight"].tolist() == [[4.0, 0.0]]


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_a_capture_of_another_shape_changes_nothing(ema_decay: float | None) -> None:
    estimate = DiagonalFisherEstimate(ema_decay=ema_decay)
    first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, bias=False)).double()
    x = torch.ones(2, 2, dtype=torch.float64)
    with estimate.capture(first):
        first(x).mean().backward()
    before = estimate.state_dict()
    with pytest.raises(gramian.GramianError, match=r"^1.weight: has shape \[3, 2\]"), estimate.capture(other):
        other(x).mean().backward()
    assert all(torch.equal(value, before[key]) for key, value in estimate.state_dict().items())


def test_a_backward_that_failed_is_not_taken_in() -> None:
    p = problem("mlp", SAMPLES)
    estimate, model = run(p, [slice(None)]), p.model()
    with pytest.raises(ZeroDivisionError), estimate.capture(model):
        p.backward(model, p.batch)
        raise ZeroDivisionError
    assert_loop(estimate, p)


def test_other_statistics_share_the_backward() -> None:
    p, norms = problem("gpt", SAMPLES), gramian.PerSampleNorms()
    estimate, model = DiagonalFisherEstimate(), p.model()
    with estimate.capture(model, norms) as seen:
        p.backward(model, p.batch)
    assert_loop(estimate, p)
    trace = sum(float(d.sum()) for d in estimate.diagonal().values())
    assert float(seen[norms].values.square().mean()) == pytest.approx(trace, rel=1e-10)


def test_state_goes_through_a_file_and_the_estimate_goes_on() -> None:
    p = problem("mlp", SAMPLES)
    first, second = run(p, [slice(0, 4)], ema_decay=0.9), DiagonalFisherEstimate(ema_decay=0.9)
    second.load_state_dict(load(save(first.state_dict())))
    model = p.model()
    with second.capture(model):
        p.backward(model, p.rows(slice(4, 6)))
    assert_loop(second, p)
    assert_tensors(second.moving_average(), run(p, [slice(0, 4), slice(4, 6)], ema_decay=0.9).moving_average(), 1e-13)
    for other in (DiagonalFisherEstimate(), DiagonalFisherEstimate("token", ema_decay=0.9)):
        with pytest.raises(gramian.GramianError, match="^state: is that of another estimate"):
            other.load_state_dict(first.state_dict())


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(gramian.GramianError, match="^merge: the other estimate is per token"):
        DiagonalFisherEstimate().merge(DiagonalFisherEstimate("token"))
    with pytest.raises(gramian.GramianError, match="^merge: a moving average depends on the order"):
        DiagonalFisherEstimate().merge(DiagonalFisherEstimate(ema_decay=0.5))
    with pytest.raises(gramian.GramianError, match='^per: expected "sample" or "token"'):
        DiagonalFisherEstimate("batch")


def test_a_merge_that_fails_changes_nothing() -> None:
    p = problem("mlp", SAMPLES)
    estimate, last = run(p, [slice(None)]), [*p.gradients][-1]
    before = estimate.state_dict()
    for other in (
        run(p, [slice(None)], reduce=lambda name, d: d.sum() if name == last else d),
        run(p, [slice(None)], reduce=lambda name, d: by_row(d)),
    ):
        with pytest.raises(gramian.GramianError, match="has shape .*; expected"):
            estimate.merge(other)
        assert all(torch.equal(value, before[key]) for key, value in estimate.state_dict().items())


def test_what_is_of_another_kind_is_refused_in_one_line() -> None:
    estimate = run(problem("mlp", SAMPLES), [slice(None)])
    state = estimate.state_dict()
    with pytest.raises(gramian.GramianError, match="^merge: got NoneType; expected a DiagonalFisherEstimate$"):
        estimate.merge(None)  # type: ignore[arg-type]
    with pytest.raises(gramian.GramianError, match="^reduce: got 3; expected a function of"):
        DiagonalFisherEstimate(reduce=3)  # type: ignore[arg-type]
    for wrong in (
        None,
        {"counts": torch.ones(1)},
        {**state, "counts": 3},
        {**state, "counts": torch.tensor([-1, 0, 0])},
        {**state, "counts": torch.tensor([1.5, 0, 0])},
        {**state, "more": torch.ones(1)},
        {**state, "average.total.x": torch.ones(1)},
    ):
        with pytest.raises(gramian.GramianError, match=r"^(state|counts): [^\n]*expected [^\n]*$"):
            estimate.load_state_dict(wrong)  # type: ignore[arg-type]
    assert all(torch.equal(value, state[key]) for key, value in estimate.state_dict().items())


def test_intervals_of_a_diagonal_cover_it_in_95_of_100_cases() -> None:
    """y = w·x with the loss y: g = x, so diag F = E x². Uneven batches; 2,000 repetitions are the inputs of one layer."""
    generator = torch.Generator().manual_seed(0)
    model, estimate = nn.Linear(2000, 1, bias=False, dtype=torch.float64), DiagonalFisherEstimate()
    with estimate.capture(model):
        for size in (1, 30, 4, 90, 2, 25):
            x = 1 + 0.5 * torch.randn(size, 2000, dtype=torch.float64, generator=generator)
            model(x).mean().backward()
    low, high = estimate.interval(0.95)["weight"]
    inside = (low <= 1.25) & (high >= 1.25)
    assert 0.93 <= float(inside.double().mean()) <= 0.97


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(4, 2), (6, 0)])
@distributed(world_size=2)
def test_captures_over_two_processes_are_those_of_one(rank: int, world_size: int, sizes: tuple[int, int]) -> None:
    p = problem("tied_gpt", SAMPLES)
    model, estimate = p.model(), DiagonalFisherEstimate(ema_decay=0.9)
    mine = splits(list(sizes))[rank]
    for _ in range(2):
        with estimate.capture(model, loss_reduction="sum", process_group=dist.group.WORLD):
            if mine.stop > mine.start:
                p.backward(model, p.rows(mine), "sum")
    twice = run(p, [slice(None)] * 2, "sum", ema_decay=0.9)
    assert estimate.samples == 2 * SAMPLES
    assert_tensors(estimate.diagonal(), twice.diagonal(), 1e-12)
    assert_tensors(estimate.standard_error(), twice.standard_error(), 1e-10)
    assert_tensors(estimate.moving_average(), twice.moving_average(), 1e-12)


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_sums_of_their_entries() -> None:
    d = torch.arange(48.0).reshape(12, 4)
    assert by_row(d).tolist() == [float(d[i].sum()) for i in range(12)]
    assert by_column(d).tolist() == [float(d[:, j].sum()) for j in range(4)]
    assert by_row(d.reshape(12, 2, 2)).tolist() == by_row(d).tolist()
    assert by_row(d[:, 0]).tolist() == d[:, 0].tolist()
    assert by_head(d, 3).tolist() == [float(d[4 * h : 4 * h + 4].sum()) for h in range(3)]
    assert by_head(d, 2, dim=1).tolist() == [float(d[:, 2 * h : 2 * h + 2].sum()) for h in range(2)]
    fused = by_head(d, 2, fused=3)
    assert fused.tolist() == [[float(d[4 * f + 2 * h :][:2].sum()) for h in range(2)] for f in range(3)]
    assert by_head(d[:, 0], 3).tolist() == [float(d[4 * h : 4 * h + 4, 0].sum()) for h in range(3)]


class ReZero(nn.Module):
    """A layer behind a gain that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x_BI: Tensor) -> Tensor:
        return x_BI + self.gain * self.inner(x_BI)


@pytest.mark.parametrize("group", [by_row, lambda d: by_head(d, 2), lambda d: by_head(d, 1, dim=-1)])
def test_a_scalar_is_a_group_of_its_own(group: Any) -> None:
    assert group(torch.tensor(3.0)).tolist() == [3.0]
    torch.manual_seed(0)
    model, x = ReZero().double(), torch.randn(3, 4, dtype=torch.float64)
    grouped, plain = DiagonalFisherEstimate(reduce=lambda name, d: group(d)), DiagonalFisherEstimate()
    for estimate in (grouped, plain):
        with estimate.capture(model):
            model(x).square().sum(1).mean().backward()
    assert grouped.diagonal()["gain"].tolist() == [float(plain.diagonal()["gain"])]
    assert_tensors(
        {k: group(d) for k, d in plain.diagonal().items()}, {k: d for k, d in grouped.diagonal().items()}, 1e-12
    )


def test_errors_of_groups_are_those_of_sums_over_each_sample() -> None:
    """Entries of one sample go together: the error of a sum is not the root of the sum of squared errors."""
    p = problem("mlp", SAMPLES)
    estimate = run(p, splits([4, 2]), reduce=lambda name, d: by_row(d) if d.dim() > 1 else d)
    squares = {k: g.square().flatten(2).sum(2) if g.dim() > 2 else g.square() for k, g in p.gradients.items()}
    assert_tensors(estimate.diagonal(), {k: s.mean(0) for k, s in squares.items()}, 1e-10)
    assert_tensors(estimate.standard_error(), {k: s.std(0) / SAMPLES**0.5 for k, s in squares.items()}, 1e-10)
    unused = run(problem("unused", SAMPLES), [slice(None)], reduce=lambda name, d: d.sum())
    assert float(unused.diagonal()["spare.weight"]) == 0.0 and unused.diagonal()["spare.weight"].dim() == 0


def test_groups_that_do_not_fit_are_refused() -> None:
    d = torch.ones(12, 4)
    with pytest.raises(gramian.GramianError, match="^heads: 1 x 5 do not divide 12"):
        by_head(d, 5)
    with pytest.raises(gramian.GramianError, match="^dim: got 2"):
        by_head(d, 2, dim=2)
    with pytest.raises(gramian.GramianError, match="^diagonal: has shape"):
        by_column(d[0])
    for call in (by_row, by_column, lambda d: by_head(d, 2)):
        with pytest.raises(gramian.GramianError, match="^diagonal: got str; expected a tensor$"):
            call("x")
    for field, options in (
        ("heads", {"heads": "x"}),
        ("dim", {"heads": 2, "dim": "x"}),
        ("fused", {"heads": 2, "fused": 1.5}),
    ):
        with pytest.raises(gramian.GramianError, match=f"^{field}: got .*; expected a whole number$"):
            by_head(d, **options)
    assert by_row(torch.ones(3, 0)).tolist() == [0.0] * 3 and by_row(torch.ones(0, 3)).tolist() == []


# ---- tokens and rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEPENDENT_TOKENS)
def test_token_traces_are_squared_norms_of_a_loop_over_tokens(name: str) -> None:
    p = problem(name, 3)
    axes = 2 if name == "linear_4d" else 1
    tokens = tuple(t.flatten(0, axes).unflatten(0, (-1, *[1] * axes)) for t in p.batch)
    count = len(tokens[0]) // 3  # a sample's loss is the mean over its tokens
    gradients = single_sample.per_sample_gradients(
        p.model(), lambda model, *batch: p.case.loss(model, *batch, reduction="sum"), tokens
    )
    model, traces = p.model(), TokenTraces()
    with gramian.observe(model, traces) as seen:
        p.backward(model, p.batch)
    for layer, found_BT in seen[traces].items():
        mine = [g for key, g in gradients.items() if key.rpartition(".")[0] == layer]
        want = sum(g.flatten(1).square().sum(1) for g in mine) / count**2
        assert_tensors({layer: found_BT.flatten()}, {layer: want}, 1e-10)


@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "reused", "conv2d"] if not FULL else [*CASES])
def test_token_and_row_traces_add_up_to_the_trace_of_the_token_fisher(name: str) -> None:
    p = problem(name, 4)
    model, fisher, traces, rows = p.model(), gramian.DiagonalFisher("token"), TokenTraces(), RowTraces()
    with gramian.observe(model, fisher, traces, rows) as seen:
        for part in splits([3, 1]):
            p.backward(model, p.rows(part))
    tolerance = p.tolerance if p.case.computes_in_float32 else 1e-10
    total = sum(float(t.sum()) for t in seen[traces].values()) / 4
    assert total == pytest.approx(sum(float(t.sum()) for t in seen[fisher].values()), rel=tolerance)
    matrices = {key: by_row(t) for key, t in seen[fisher].items() if t.dim() > 1}
    assert_tensors(seen[rows], matrices, tolerance)


def test_traces_of_several_passes_stand_one_below_the_other() -> None:
    p = problem("gpt", 3)
    model, apart = p.model(), []
    passes = [(p.batch[0][:2], p.batch[1][:2]), (p.batch[0][2:, :4], p.batch[1][2:, :4])]
    joint = TokenTraces()
    with gramian.observe(model, joint, loss_reduction="sum") as seen:
        for batch in passes:
            p.backward(model, batch, "sum")
    for batch in passes:
        alone = TokenTraces()
        with gramian.observe(model, alone, loss_reduction="sum") as one:
            p.backward(model, batch, "sum")
        apart.append(one[alone])
    for layer, found_BT in seen[joint].items():
        assert found_BT.shape == (3, 6)
        assert torch.equal(found_BT[:2], apart[0][layer]) and torch.equal(found_BT[2:, :4], apart[1][layer])
        assert not found_BT[2:, 4:].any()
