"""Sparse and sampled teachers: the same loss from a few ids of every token, and what is refused."""

import pytest
import torch

from gramian.core.errors import GramianError
from gramian.distill import Head, distill_loss
from gramian.distill.loss.sparse_tail import tail_at
from gramian.distill.teacher.signal import Tail
from tests.distill import eager
from tests.distill.loss_cases import Case, check, oracle, ours, relative, teacher_logits, topk_of

DIRECTIONS = ({"direction": "forward"}, {"direction": "reverse"}, {"direction": "jsd", "beta": 0.3})
KNOTS = torch.tensor([0.1, 0.2, 0.4, 0.5, 2 / 3, 1.0], dtype=torch.float64)


@pytest.mark.oracle
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("head", [{}, {"bias": True, "scale": 0.9, "softcap": 4.0}])
def test_with_a_tail_it_is_the_divergence_over_the_kept_ids_and_all_others(direction, dtype, head):
    """At the knots, where the curve is exact, so that the oracle's own tail is the same."""
    case = Case(dtype=dtype, **head)
    squash = (case.scale, case.softcap)
    plain = teacher_logits(case, case.teacher_bias.double() if case.bias else None, squash)
    for T in (1.0, 1.5, 2.0, 5.0, 10.0):
        logits, ids = plain.topk(5, 1)
        rest = plain.scatter(1, ids, -torch.inf)
        values = torch.stack([(u * rest).logsumexp(1) for u in KNOTS], 1)
        slopes = torch.stack([((u * rest).softmax(1) * plain).sum(1) for u in KNOTS], 1)
        topk = (ids, logits, Tail(values, slopes, KNOTS))
        check(case, T, teacher_topk=topk, oracle_options={"ids": ids}, **direction)


@pytest.mark.oracle
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_ids_without_a_tail_are_the_dense_teacher(direction):
    case = Case()
    T = torch.tensor(2.5, dtype=torch.float64)
    want, want_gradients = ours(case, T, **direction)
    got, gradients = ours(case, T, teacher_topk=topk_of(case, 37), **direction)
    torch.testing.assert_close(got.sums, want.sums, rtol=1e-12, atol=1e-12)
    for name, gradient in want_gradients.items():
        assert relative(gradients[name], gradient) < 1e-12, name


@pytest.mark.oracle
@pytest.mark.parametrize("direction", [DIRECTIONS[0], DIRECTIONS[2]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_tail_the_kept_ids_hold_all_mass(direction, dtype):
    case = Case(dtype=dtype)
    ids, logits, _ = topk_of(case, 5)
    nothing = torch.full((9, 37), -torch.inf, dtype=torch.float64)
    leaves = [case.tensors[name].double().requires_grad_() for name in ("student_hidden", "student_weight")]
    loss, metrics = eager.loss(
        leaves[0] @ leaves[1].T, case.targets, nothing.scatter(1, ids, logits), 2.0, ids=ids, **direction
    )
    out, gradients = ours(case, 2.0, teacher_topk=(ids, logits, None), **direction)
    bar = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative(out.loss, loss) < bar
    for gradient, want in zip(gradients.values(), torch.autograd.grad(loss, leaves), strict=True):
        assert relative(gradient, want) < 10 * bar
    for name in ("kl", "ce", "agreement", "teacher_entropy", "student_entropy"):
        assert abs(float(getattr(out, name)) - float(metrics[name])) < 10 * bar, name


def test_between_the_knots_the_temperatures_gradient_is_that_of_the_curve_used():
    case = Case()
    topk = topk_of(case, 5, KNOTS)
    for T in (1.2, 3.3, 8.0):
        _, gradients = ours(case, torch.tensor(T, dtype=torch.float64), teacher_topk=topk)
        ahead, behind = (ours(case, T + step, teacher_topk=topk)[0].loss for step in (1e-5, -1e-5))
        torch.testing.assert_close(gradients["T"], (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)


def test_between_the_knots_probabilities_and_tail_mass_are_nearly_right():
    case = Case(vocabulary=400)
    z = teacher_logits(case)
    ids, logits, tail = topk_of(case, 16, KNOTS)
    for T in (1.1, 1.7, 2.2, 3.0, 4.0, 7.0):
        rest, slope = tail_at(tail, 1 / T)
        exact = (z / T).scatter(1, ids, -torch.inf)
        torch.testing.assert_close(rest, exact.logsumexp(1), rtol=0, atol=2e-3)
        torch.testing.assert_close(slope, (exact.softmax(1) * z).sum(1), rtol=0, atol=2e-2)
        log_probs = torch.cat([logits / T, rest[:, None]], 1).log_softmax(1)
        torch.testing.assert_close(log_probs, eager.lumped(z, ids, T), rtol=0, atol=2e-3)


def test_the_curve_meets_its_knots_and_goes_on_along_its_tangent():
    tail = topk_of(Case(), 5, KNOTS)[2]
    for i, u in enumerate(KNOTS):
        for argument in (float(u), u):
            value, slope = tail_at(tail, argument)
            torch.testing.assert_close(value, tail.values_BTQ[:, i], rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(slope, tail.slopes_BTQ[:, i], rtol=1e-13, atol=1e-13)
    value, slope = tail_at(tail, torch.tensor(1.5, dtype=torch.float64))
    torch.testing.assert_close(slope, tail.slopes_BTQ[:, -1])
    torch.testing.assert_close(value, tail.values_BTQ[:, -1] + 0.5 * slope)
    value, slope = tail_at(tail, torch.tensor(0.05, dtype=torch.float64))
    torch.testing.assert_close(value, tail.values_BTQ[:, 0] - 0.05 * slope)


def test_a_float_outside_the_curve_is_refused_with_the_range():
    case = Case()
    topk = topk_of(case, 5, KNOTS.float()[2:])
    for T in (1.0, 2.5):
        ours(case, T, teacher_topk=topk)
    for T in (0.9, 3.0):
        with pytest.raises(GramianError, match=rf"temperature: {T:g}; expected 1 to 2.5, which the tail curve covers"):
            ours(case, T, teacher_topk=topk)
    ours(case, torch.tensor(3.0), teacher_topk=topk)
    with pytest.raises(GramianError, match="tail: 1 knots; expected at least 2"):
        tail_at(Tail(torch.zeros(9, 1), torch.zeros(9, 1), torch.ones(1)), 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_a_kept_id_without_mass_is_one_of_hardly_any(direction, dtype):
    """As filters of other programs write them."""
    case = Case(dtype=torch.float64)
    ids, logits = topk_of(case, 6)[:2]
    found = []
    for little in (-torch.inf, -400.0):
        told = logits.clone().to(dtype)
        told[:, 3] = little
        heat = torch.tensor(2.0, dtype=torch.float64)
        out, gradients = ours(case, heat, teacher_topk=(ids, told, None), direction=direction)
        found.append((out.loss, out.kl, out.teacher_entropy, gradients["weight"], gradients["T"]))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all() and relative(one, other) < 1e-6


def test_ids_of_any_integer_dtype_and_logits_of_two_bytes():
    case = Case(dtype=torch.float32)
    ids, logits, _ = topk_of(case, 5)
    want, _ = ours(case, 2.0, teacher_topk=(ids, logits.half().float(), None))
    for dtype in (torch.int32, torch.uint8):
        got, _ = ours(case, 2.0, teacher_topk=(ids.to(dtype), logits.half(), None))
        assert got.loss == want.loss


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples_give_the_cross_entropy_and_its_gradient(dtype):
    case = Case(dtype=dtype)
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (9, 12), generator=source)  # some of them twice
    weights = torch.rand(9, 12, generator=source, dtype=torch.float64).softmax(1)
    leaves = [case.tensors[name].double().requires_grad_() for name in ("student_hidden", "student_weight")]
    log_q = ((leaves[0] @ leaves[1].T) / 2.0).log_softmax(1)
    counts = case.targets != -100
    entropy = -(weights * log_q.gather(1, ids)).sum(1)[counts].mean()
    out, gradients = ours(case, 2.0, teacher_sampled=(ids, weights), ce_weight=0.0)
    bar = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative(out.loss, 4 * entropy) < bar and relative(out.kl, entropy) < bar
    for gradient, want in zip(gradients.values(), torch.autograd.grad(4 * entropy, leaves), strict=True):
        assert relative(gradient, want) < bar
    assert out.teacher_entropy.isnan() and out.agreement.isnan() and out.correlation.isnan()
    assert abs(float(out.ce) - float(oracle(case, 2.0)[1]["ce"])) < 10 * bar


def test_samples_are_unbiased():
    """Over all single draws, each weighted by its probability, gradient and value are those of the whole distribution."""
    case = Case(tokens=2, masked=())
    p = (teacher_logits(case) / 2.0).softmax(1)
    whole, want = ours(case, 2.0, ce_weight=0.0)
    out, got = ours(case, 2.0, ce_weight=0.0, teacher_sampled=(torch.arange(37).expand(2, 37), p))
    torch.testing.assert_close(out.kl - whole.teacher_entropy, whole.kl)
    torch.testing.assert_close(got["weight"], want["weight"])


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_teacher_it_is_the_cross_entropy(dtype):
    case = Case(dtype=dtype, bias=True, scale=0.8, softcap=3.0)
    leaves = [tensor.clone().requires_grad_() for tensor in (*list(case.tensors.values())[:2], case.student_bias)]
    head = Head(leaves[1], leaves[2], 0.8, 3.0)
    out = distill_loss(leaves[0], head, case.targets, kd_weight=0.0, ce_weight=1.0)
    loss, metrics, want = oracle(case, 2.0, kd_weight=0.0, ce_weight=1.0)
    bar = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative(out.loss, loss) < bar and relative(out.ce, metrics["ce"]) < bar
    assert relative(out.student_entropy, metrics["student_entropy"]) < bar and out.kl.isnan()
    for gradient, name in zip(torch.autograd.grad(out.loss, leaves), ("hidden", "weight", "bias"), strict=True):
        assert relative(gradient, want[name]) < bar
    heat = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    distill_loss(leaves[0], head, case.targets, kd_weight=0.0, temperature=heat).loss.backward()
    assert heat.grad == 0
    with pytest.raises(GramianError, match="teacher: expected teacher_hidden"):
        distill_loss(leaves[0], head, case.targets)


REFUSED = {
    "temperature: 0; expected a number above 0": {"temperature": 0},
    "temperature: -1.0; expected": {"temperature": -1.0},
    "temperature: nan; expected": {"temperature": float("nan")},
    r"temperature: torch.float32 \[1\]; expected a 0-dim": {"temperature": torch.ones(1)},
    "direction: 'backward'; expected one of forward, reverse, jsd": {"direction": "backward"},
    "beta: 1.5; expected 0 to 1": {"beta": 1.5},
    "num_terms: 0; expected": {"num_terms": 0},
    r"num_terms: \[2\]; expected": {"num_terms": torch.ones(2)},
    "targets: 37; expected ids of the student, 0 to 36": {"targets": torch.full((9,), 37)},
    r"targets: torch.float32 \[9\]; expected integers": {"targets": torch.zeros(9)},
    "student_hidden: 9 tokens; expected 4": {"targets": torch.zeros(4, dtype=torch.int64)},
    r"student_hidden: torch.float64 \[3, 3, 6\]; expected floating": {"student_hidden": torch.ones(3, 3, 6).double()},
    "student_weight: Linear; expected a tensor": {"student_weight": torch.nn.Linear(6, 37)},
    "teacher_weight: Linear; expected a tensor": {"teacher_weight": torch.nn.Linear(8, 37)},
    "teacher_weight: width 5; expected 8": {"teacher_weight": torch.ones(37, 5)},
    r"teacher_weight: bias \[3\]; expected \[37\]": {"teacher_weight": Head(torch.ones(37, 8), torch.ones(3))},
    "student_weight: no rows": {"student_weight": torch.ones(0, 6), "targets": torch.full((9,), -100)},
    "teacher: expected teacher_hidden with teacher_weight": {"teacher_weight": None},
    "teacher: expected .* or kd_weight=0 and none": {"teacher_sampled": (torch.zeros(9, 1).long(), torch.ones(9, 1))},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_by_name(message):
    case = Case()
    with pytest.raises(GramianError, match=message):
        distill_loss(**{"targets": case.targets, **case.tensors, **REFUSED[message]})


SPARSE_REFUSED = {
    r"teacher_topk: ids \[9, 2\] and values \[9, 3\]": {
        "teacher_topk": (torch.zeros(9, 2).long(), torch.ones(9, 3), None)
    },
    "teacher_topk: 40; expected ids of the student": {"teacher_topk": (torch.full((9, 1), 40), torch.ones(9, 1), None)},
    'direction: "reverse" is infinite': {
        "teacher_topk": (torch.zeros(9, 1).long(), torch.ones(9, 1), None),
        "direction": "reverse",
    },
    r"teacher_topk: tail \[8, 2\]; expected \[9, 2\]": {
        "teacher_topk": (
            torch.zeros(9, 1).long(),
            torch.ones(9, 1),
            Tail(torch.zeros(8, 2), torch.zeros(8, 2), torch.tensor([0.5, 1.0])),
        )
    },
    'direction: "jsd" cannot be computed from samples': {
        "teacher_sampled": (torch.zeros(9, 1).long(), torch.ones(9, 1)),
        "direction": "jsd",
    },
    "temperature: a sampled teacher is valid only at the one": {
        "teacher_sampled": (torch.zeros(9, 1).long(), torch.ones(9, 1)),
        "temperature": torch.tensor(2.0, requires_grad=True),
    },
}


@pytest.mark.parametrize("message", SPARSE_REFUSED)
def test_bad_sparse_input_is_refused_by_name(message):
    case = Case()
    student = (case.tensors["student_hidden"], case.tensors["student_weight"], case.targets)
    with pytest.raises(GramianError, match=message):
        distill_loss(*student, **SPARSE_REFUSED[message])


def test_a_teacher_of_inference_mode_serves_a_fixed_temperature_only():
    case = Case()
    want, want_gradients = ours(case, 2.0)
    with torch.inference_mode():
        case.tensors["teacher_hidden"] = case.tensors["teacher_hidden"] * 1
        ids, logits = topk_of(case, 5)[:2]
    got, gradients = ours(case, 2.0)
    assert got.loss == want.loss and gradients["weight"].equal(want_gradients["weight"])
    heat = torch.tensor(2.0, dtype=torch.float64)
    for options in ({}, {"teacher_topk": (ids, logits, None)}):
        with pytest.raises(GramianError, match="teacher: made in inference mode.*expected torch.no_grad"):
            ours(case, heat, **options)
