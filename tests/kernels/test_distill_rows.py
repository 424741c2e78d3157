"""Rows of the distillation loss, kernel and twin, against float64 autograd through whole logits."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.kernels.distillation.distill_rows import (
    ROWS,
    RowObjective,
    Squash,
    distill_rows,
    distill_rows_kernel,
    distill_rows_twin,
)
from tests.distill import eager
from tests.kernels import interpreted, laid_out, random
from tests.kit.close import ROUNDINGS
from tests.kit.matrix import examples, sample

DIRECTIONS = ("forward", "reverse", "jsd")


def rows_of(function, *args, gradient=True, **kwargs):
    """The rows, and what became of the student's products."""
    student = args[0]
    rows = function(student, *args[1:], gradient=gradient, **kwargs)
    return rows, student


def problem(tokens, vocabulary, teacher_vocabulary, dtype=torch.float32, seed=0):
    s = 2 * random(tokens, vocabulary, seed=seed)
    t = 2 * random(tokens, teacher_vocabulary, seed=seed + 1)
    common = min(vocabulary, teacher_vocabulary)
    t[:, :common] += s[:, :common]
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    targets[::3] = -100
    return s.to(dtype), t.to(dtype), targets


def expected(s, t, targets, T, objective, student, teacher):
    """kl, ce, dL/dT of every token by itself and d(sum)/d(products), in float64."""
    products = s.double().clone().requires_grad_()
    temperature = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    z = eager.logits(products, torch.eye(s.shape[1], dtype=torch.float64), None, student.scale, student.softcap)
    z_t = eager.logits(t.double(), torch.eye(t.shape[1], dtype=torch.float64), None, teacher.scale, teacher.softcap)
    names = ("kl", "ce", "agreement", "teacher_entropy", "student_entropy")
    want = {name: torch.zeros(len(s), dtype=torch.float64) for name in (*names, "slope")}
    total = 0.0
    for i in range(len(s)):
        if targets[i] == objective.ignore_index:
            continue
        row = slice(i, i + 1)
        settings_ = {"direction": objective.direction, "beta": objective.beta}
        kd, metrics = eager.loss(z[row], targets[row], z_t[row], temperature, ce_weight=0.0, **settings_)
        want["slope"][i] = torch.autograd.grad(kd, temperature, retain_graph=True)[0]
        for name in names:
            want[name][i] = metrics[name]
        weights = {"kd_weight": objective.kd_weight, "ce_weight": objective.ce_weight}
        total = total + eager.loss(z[row], targets[row], z_t[row], temperature, **weights, **settings_)[0]
    return want, torch.autograd.grad(total, products)[0] if isinstance(total, torch.Tensor) else torch.zeros_like(z)


def logit_size(*logits):
    return max(float(z.abs().max()) for z in logits)


def check(rows, gradient, s, t, targets, T, objective, student, teacher, tolerance):
    want, want_gradient = expected(s, t, targets, T, objective, student, teacher)
    got = dict(zip(ROWS, rows.double(), strict=True))
    counts = targets != objective.ignore_index
    assert got["terms"].equal(counts.double())
    # Each is a difference of sums as large as the logits over T: an entropy of nearly 0 has no relative accuracy.
    terms = ROUNDINGS * torch.finfo(torch.float32).eps * (logit_size(s, t) / min(T, 1.0) + math.log(max(s.shape[1], 2)))
    for name, value in want.items():
        atol = tolerance * float(value.abs().max()) + terms * (2 * T if name == "slope" else 1)
        torch.testing.assert_close(got[name], value, rtol=10 * tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    common = min(s.shape[1], t.shape[1])
    known = counts & (targets < common)
    assert got["gold"].equal(known.double())
    z_t = eager.logits(
        t.double()[:, :common], torch.eye(common, dtype=torch.float64), None, teacher.scale, teacher.softcap
    )
    gold = z_t.log_softmax(1).gather(1, targets.clamp(0, common - 1)[:, None])[:, 0]
    torch.testing.assert_close(got["teacher_gold"], torch.where(known, gold, 0.0), rtol=1e-5, atol=1e-5)
    assert not gradient[~counts].any()
    scale = float(want_gradient.abs().max())
    rounding = torch.finfo(gradient.dtype).eps / 2 if gradient.dtype in (torch.bfloat16, torch.float16) else 0.0
    torch.testing.assert_close(
        gradient.double(), want_gradient, rtol=10 * tolerance + 2 * rounding, atol=(tolerance + 1e-7) * scale
    )


CASES = sample(
    list(
        itertools.product(
            DIRECTIONS,
            (1.0, 1.5, 2.0, 5.0, 10.0),
            ((5, 37, 37), (4, 40, 33), (4, 33, 40), (1, 1, 1)),
            (torch.float32, torch.bfloat16, torch.float16),
            (Squash(), Squash(0.5, 3.0)),
        )
    ),
    14,
    case=lambda item: (item[0], item[2]),
)


@pytest.mark.parametrize(("direction", "T", "shape", "dtype", "squash"), CASES)
def test_kernel_and_twin_are_float64s_rows(direction, T, shape, dtype, squash):
    s, t, targets = problem(*shape, dtype=dtype)
    targets[-1] = shape[1] - 1
    objective = RowObjective(direction=direction, beta=0.3, kd_weight=0.7, ce_weight=0.4)
    args = (s, t, targets, torch.tensor(T), objective, squash, Squash(1.25))
    for function, options in ((distill_rows_twin, {}), (distill_rows_kernel, {"block": 16})):
        rows, gradient = interpreted(rows_of, function, s.clone(), *args[1:], **options)
        assert rows.dtype == torch.float32 and gradient.dtype == dtype
        check(rows, gradient, s, t, targets, T, objective, squash, Squash(1.25), 3e-6)


@settings(max_examples=examples(8))
@given(
    tokens=st.integers(1, 4),
    vocabulary=st.integers(1, 70),
    teacher_vocabulary=st.integers(1, 70),
    block=st.sampled_from([16, 32, 128]),
    direction=st.sampled_from(DIRECTIONS),
    T=st.floats(0.5, 10),
)
def test_kernel_at_any_shape(tokens, vocabulary, teacher_vocabulary, block, direction, T):
    s, t, targets = problem(tokens, vocabulary, teacher_vocabulary, seed=vocabulary)
    objective = RowObjective(direction=direction)
    rows, gradient = interpreted(
        rows_of, distill_rows_kernel, s.clone(), t, targets, torch.tensor(T), objective, block=block
    )
    check(rows, gradient, s, t, targets, T, objective, Squash(), Squash(), 3e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
def test_float64_is_kept_by_the_twin_and_a_small_divergence_is_not_lost(function, direction):
    """At T = 10 and logits 0.01 apart the divergence is 5e-7: eight digits below the normalisers it comes from."""
    s, _, targets = problem(3, 200, 200)
    t = s + 0.01 * random(3, 200, seed=3)
    objective = RowObjective(direction=direction)
    want, _ = expected(s, t, targets, 10.0, objective, Squash(), Squash())
    rows, _ = interpreted(rows_of, function, s.clone(), t, targets, torch.tensor(10.0), objective)
    torch.testing.assert_close(rows[1].double(), want["kl"], rtol=2e-4, atol=0)
    exact, _ = rows_of(
        distill_rows_twin, s.double(), t.double(), targets, torch.tensor(10.0, dtype=torch.float64), objective
    )
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact[1], want["kl"], rtol=1e-8, atol=0)


@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masked_rows_are_zero_whatever_they_hold(direction, function):
    s, t, targets = problem(6, 21, 21)
    s[0], t[0], s[3, 4] = float("nan"), float("inf"), float("inf")
    rows, gradient = interpreted(rows_of, function, s.clone(), t, targets, torch.tensor(2.0), RowObjective(direction))
    assert not rows[:, ::3].any() and not gradient[::3].any()
    assert rows.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
def test_without_gradient_nothing_is_written_and_the_rows_are_the_same(function):
    for direction in DIRECTIONS:
        s, t, targets = problem(5, 33, 30)
        args = (t, targets, torch.tensor(3.0), RowObjective(direction))
        with_rows, _ = interpreted(rows_of, function, s.clone(), *args)
        rows, after = interpreted(rows_of, function, s.clone(), *args, gradient=False)
        assert after.equal(s) and rows.equal(with_rows)


@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
def test_padded_rows_are_read_and_written_in_their_place(function):
    s, t, targets = problem(5, 33, 30)
    args = (targets, torch.tensor(3.0), RowObjective())
    want, gradient = interpreted(rows_of, function, s.clone(), t, *args)
    around_s, around_t = laid_out(s, "amid nan"), laid_out(t, "amid nan")
    rows, after = interpreted(rows_of, function, around_s, around_t, *args)
    assert rows.equal(want) and after.equal(gradient)
    whole = torch.as_strided(after, (8, 38), (38, 1), 0)
    assert int(whole.isnan().sum()) == 8 * 38 - 5 * 33


@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
def test_equal_sides_have_no_divergence_and_no_gradient(function):
    s, _, targets = problem(5, 65, 65)
    for direction in DIRECTIONS:
        objective = RowObjective(direction, ce_weight=0.0)
        rows, gradient = interpreted(rows_of, function, s.clone(), s.clone(), targets, torch.tensor(3.0), objective)
        assert not gradient.any() and not rows[1].any() and rows[3].equal((targets != -100).float())


@pytest.mark.parametrize("function", [distill_rows_twin, distill_rows_kernel])
def test_a_target_outside_the_vocabulary_is_not_a_number(function):
    s, t, _ = problem(3, 9, 9)
    rows, _ = interpreted(rows_of, function, s, t, torch.tensor([2, 9, -3]), torch.tensor(2.0), RowObjective())
    assert rows[2].isnan().tolist() == [False, True, True]


def test_dispatch_on_a_cpu_gives_the_twin():
    s, t, targets = problem(4, 12, 12)
    args = (t, targets, torch.tensor(2.0), RowObjective())
    out = torch.empty(len(ROWS), 4)
    assert distill_rows(s.clone(), *args, gradient=False, out_RN=out) is out
    assert out.equal(distill_rows_twin(s.clone(), *args, gradient=False))
