"""The distillation loss on a GPU: float64's answers, the kernel what the twin is, nothing waits, little is held."""

import itertools

import pytest
import torch

from gramian.distill import Head, distill_loss
from gramian.distill.teacher.signal import Tail
from gramian.kernels.distillation.distill_rows import (
    ROWS,
    RowObjective,
    Squash,
    distill_rows,
    distill_rows_kernel,
    distill_rows_twin,
)
from gramian.kernels.distillation.rest_rows import (
    rest_gradient_kernel_,
    rest_gradient_twin_,
    rest_rows_kernel,
    rest_rows_twin,
)
from tests.distill.loss_cases import Case, check, oracle, ours, relative, topk_of

pytestmark = pytest.mark.gpu

DIRECTIONS = ({"direction": "forward"}, {"direction": "reverse"}, {"direction": "jsd", "beta": 0.3})
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def logits(tokens, vocabulary, teacher_vocabulary, dtype):
    """Rows amid NaN, as they lie in a padded buffer."""
    student = torch.full((tokens, vocabulary + 7), float("nan"), device="cuda", dtype=dtype)[:, :vocabulary]
    teacher = torch.full((tokens, teacher_vocabulary + 9), float("nan"), device="cuda", dtype=dtype)[
        :, :teacher_vocabulary
    ]
    student.copy_(3 * random(tokens, vocabulary)), teacher.copy_(3 * random(tokens, teacher_vocabulary, seed=1))
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    targets[::5] = -100
    return student, teacher, targets


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 100, 100), (33, 5003, 4999), (17, 50257, 50304), (300, 128256, 128256)]
)
@pytest.mark.parametrize("squash", [Squash(), Squash(0.5, 10.0)])
def test_the_kernel_is_the_twin_in_float64(direction, dtype, shape, squash):
    student, teacher, targets = logits(*shape, dtype)
    objective = RowObjective(**direction)
    for T in (1.0, 2.0, 10.0):
        wide = student.double()
        want = distill_rows_twin(
            wide,
            teacher.double(),
            targets,
            torch.tensor(T, device="cuda").double(),
            objective,
            squash,
            squash,
            gradient=True,
        )
        products = torch.full((shape[0], shape[1] + 7), float("nan"), device="cuda", dtype=dtype)[:, : shape[1]]
        products.copy_(student)
        rows = distill_rows_kernel(
            products, teacher, targets, torch.tensor(T, device="cuda"), objective, squash, squash, gradient=True
        )
        kl = float(want[1].max())
        for name, got, true in zip(ROWS, rows.double(), want, strict=True):
            room = 2e-5 * 2 * T * kl if name == "slope" else 0.0
            torch.testing.assert_close(
                got,
                true,
                rtol=1e-4,
                atol=2e-6 * float(true.abs().max()) + room + 1e-7,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        torch.testing.assert_close(
            products.double(), wide, rtol=1e-4 + rounding, atol=2e-6 * float(wide.abs().max()) + 6e-8
        )
        assert not products[targets == -100].any()


def test_the_kernel_is_what_ran_and_gives_the_same_bits_every_time(monkeypatch):
    def twin(*args, **kwargs):
        raise AssertionError("a twin ran")

    monkeypatch.setattr("gramian.kernels.distillation.distill_rows.distill_rows_twin", twin)
    student, teacher, targets = logits(64, 5003, 5003, torch.bfloat16)
    first = None
    for _ in range(5):
        products = student.clone()
        rows = distill_rows(products, teacher, targets, torch.tensor(2.0, device="cuda"), RowObjective(), gradient=True)
        assert first is None or (rows.equal(first[0]) and products.equal(first[1]))
        first = rows, products


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sides_have_no_divergence_and_no_gradient(dtype, direction):
    student, _, targets = logits(64, 50257, 1, dtype)
    objective = RowObjective(**direction, ce_weight=0.0)
    products = student.clone()
    rows = distill_rows_kernel(products, student, targets, torch.tensor(3.0, device="cuda"), objective, gradient=True)
    assert float(rows[1].abs().max()) < 1e-12 and float(products.abs().max()) < 1e-10  # in float16 1e-10 would be 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("T", [1.0, 1.5, 2.0, 5.0, 10.0])
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 33, "vocabulary": 1001},
        {"tokens": 65, "vocabulary": 5003, "teacher_vocabulary": 5056},
        {"tokens": 17, "vocabulary": 3001, "bias": True, "scale": 0.7, "softcap": 4.0},
        {"tokens": 129, "vocabulary": 50257, "widths": (64, 96)},
        {"tokens": 33, "vocabulary": 128256, "widths": (64, 96)},
    ],
    ids=str,
)
def test_float32_within_the_bars_of_the_oracle(shape, T, direction):
    check(Case(dtype=torch.float32, device="cuda", **shape), T, **direction)


def test_float64_stays_float64():
    check(Case(device="cuda", tokens=33, vocabulary=1001), 2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("vocabulary", [1024, 5003])
def test_half_precision(vocabulary, direction, dtype):
    case = Case(dtype=dtype, device="cuda", tokens=300, vocabulary=vocabulary, widths=(64, 96))
    out, gradients = ours(case, torch.tensor(2.0, device="cuda"), **direction)
    loss, metrics, want = oracle(case, 2.0, **direction)
    eps = torch.finfo(dtype).eps
    assert relative(out.loss, loss) < eps
    assert relative(out.kl, metrics["kl"]) < 2 * eps
    for name in ("hidden", "weight"):
        assert gradients[name].dtype == dtype and relative(gradients[name], want[name]) < 2 * eps, name
    assert abs(float(gradients["T"]) - float(want["T"])) < 0.02 * (abs(float(want["T"])) + 2 * float(metrics["kl"]))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sparse_teacher(dtype, direction):
    case = Case(dtype=dtype, device="cuda", tokens=33, vocabulary=5003, widths=(32, 32))
    ids, values, tail = topk_of(case, 16, torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64))
    tail = Tail(tail.values_BTQ.cuda(), tail.slopes_BTQ.cuda(), tail.knots_Q)
    for T in (1.0, 2.0, 5.0):
        check(case, T, teacher_topk=(ids, values, tail), oracle_options={"ids": ids.cpu()}, **direction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("squash", [Squash(), Squash(0.5, 10.0)])
@pytest.mark.parametrize("vocabulary", [1, 5003, 128256])
def test_the_kernels_of_the_rest_are_the_twins_in_float64(vocabulary, squash, dtype):
    x, _, targets = logits(33, vocabulary, 1, dtype)
    x[:, 1::3] = -torch.inf
    for T in (1.0, 2.0, 10.0):
        temperature = torch.tensor(T, device="cuda")
        want = rest_rows_twin(x.double(), temperature, squash)
        torch.testing.assert_close(rest_rows_kernel(x, temperature, squash).double(), want, rtol=1e-5, atol=1e-5)
        coefficients = (random(33), want[1].float(), want[3].float() + 0.3)
        wide, products = x.double(), x.clone()
        exact = [one.double() for one in coefficients]
        rest_gradient_twin_(wide, targets, temperature, *exact, 0.4, -100, squash)
        rest_gradient_kernel_(products, targets, temperature, *coefficients, 0.4, -100, squash)
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        torch.testing.assert_close(
            products.double(), wide, rtol=1e-4 + rounding, atol=2e-6 * float(wide.abs().max()) + 6e-8
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sparse_teacher_in_half_precision_beside_float32(dtype):
    case = Case(dtype=dtype, device="cuda", tokens=300, vocabulary=5003, widths=(64, 64))
    wide = Case(dtype=dtype, device="cuda", tokens=300, vocabulary=5003, widths=(64, 64))
    wide.tensors = {name: tensor.float() for name, tensor in case.tensors.items()}
    ids, values, tail = topk_of(case, 16, torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64))
    topk = (ids, values, Tail(tail.values_BTQ.cuda(), tail.slopes_BTQ.cuda(), tail.knots_Q))
    eps = torch.finfo(dtype).eps
    for direction in DIRECTIONS:
        want, want_gradients = ours(wide, 2.0, teacher_topk=topk, **direction)
        out, gradients = ours(case, 2.0, teacher_topk=topk, **direction)
        assert relative(out.loss, want.loss.double().cpu()) < eps
        for name in ("hidden", "weight"):
            assert relative(gradients[name], want_gradients[name].double().cpu()) < 2 * eps, name


def test_many_chunks_are_one(monkeypatch):
    case = Case(dtype=torch.float32, device="cuda", tokens=1000, vocabulary=1003, widths=(64, 64))
    T = torch.tensor(2.0, device="cuda")
    whole, want = ours(case, T)
    monkeypatch.setattr("gramian.distill.loss.fused_loss.chunk_tokens", lambda _: 128)
    parts, gradients = ours(case, T)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-6, atol=1e-6)
    for name in want:
        assert relative(gradients[name], want[name].double().cpu()) < 1e-5, name


def test_nothing_waits_for_the_device():
    knots = torch.tensor([0.2, 0.5, 1.0])
    half = Case(dtype=torch.bfloat16, device="cuda", tokens=300, vocabulary=1003, widths=(64, 64))
    ids, values, tail = topk_of(half, 8, knots)
    tail = Tail(tail.values_BTQ.cuda().float(), tail.slopes_BTQ.cuda().float(), knots)
    student, weight = (half.tensors[name].requires_grad_() for name in ("student_hidden", "student_weight"))
    dense = {name: half.tensors[name] for name in ("teacher_hidden", "teacher_weight")}
    bias = torch.zeros(1003, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    heat, terms = torch.tensor(2.0, device="cuda", requires_grad=True), torch.tensor(250, device="cuda")
    teachers = (
        dense,
        {"teacher_topk": (ids, values, tail)},
        {"teacher_topk": (ids, values, None)},
        {"teacher_sampled": (ids, values.softmax(1))},
        {"kd_weight": 0.0},
    )
    runs = list(itertools.product(teachers, (2.0, heat), (None, 250, terms), (weight, Head(weight, bias, 0.9, 8.0))))

    def step(teacher, temperature, num_terms, head):
        if "teacher_sampled" in teacher and temperature is heat:
            temperature = 2.0
        out = distill_loss(student, head, half.targets, **teacher, temperature=temperature, num_terms=num_terms)
        out.loss.backward()
        with torch.no_grad():
            distill_loss(student, head, half.targets, **teacher, temperature=temperature, num_terms=num_terms)
        return [out.kl, out.ce, out.agreement, out.teacher_entropy, out.student_entropy, out.correlation]

    for run in runs:
        step(*run)  # kernels are loaded and libraries start
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs:
            step(*run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("student", "teacher", "vocabulary", "most"),
    [(1024, 2048, 50257, 1.5 * 0.57e9), (2048, 4096, 128256, 1.5 * 1.22e9)],
)
def test_extra_memory_stays_within_one_and_a_half_times_ligers(student, teacher, vocabulary, most):
    hidden = random(8192, student, dtype=torch.bfloat16).requires_grad_()
    weight = random(vocabulary, student, dtype=torch.bfloat16).mul_(student**-0.5).requires_grad_()
    other = random(8192, teacher, dtype=torch.bfloat16), random(vocabulary, teacher, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (8192,), device="cuda")
    heat = torch.tensor(2.0, device="cuda", requires_grad=True)

    def step():
        distill_loss(hidden, weight, targets, *other, temperature=heat).loss.backward()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < most


def test_rows_beyond_the_reach_of_32_bits():
    """The last row begins after 2³¹ elements."""
    tokens, vocabulary = 17000, 128256
    student = torch.zeros(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
    teacher = torch.zeros(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
    student[-1, 5], teacher[-1, 7] = 3.0, 3.0
    targets = torch.full((tokens,), -100, device="cuda")
    targets[-1] = 5
    rows = distill_rows_kernel(
        student, teacher, targets, torch.tensor(1.0, device="cuda"), RowObjective(), gradient=True
    )
    assert rows[1, -1] > 0 and not rows[:, :-1].any() and student[-1, 5] < 0 and student[-1, 7] < 0
