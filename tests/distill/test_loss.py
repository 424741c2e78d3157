"""The fused loss against autograd through whole logits in float64."""

import itertools

import pytest
import torch

from gramian.distill import distill_loss
from tests.distill.loss_cases import Case, check, oracle, ours, relative
from tests.kit.matrix import FULL, sample

pytestmark = pytest.mark.oracle

DIRECTIONS = ({"direction": "forward"}, {"direction": "reverse"}, {"direction": "jsd", "beta": 0.3})
TEMPERATURES = (1.0, 1.5, 2.0, 5.0, 10.0)
SHAPES = {"square": {}, "one": {"tokens": 1, "vocabulary": 1, "masked": ()}, "odd": {"tokens": 17, "vocabulary": 1001},
          "teacher is padded": {"teacher_vocabulary": 40}, "student is padded": {"teacher_vocabulary": 31},
          "head": {"bias": True, "scale": 0.7, "softcap": 2.5}}  # fmt: skip

MATRIX = sample(
    list(itertools.product(DIRECTIONS, SHAPES, TEMPERATURES, (torch.float64, torch.float32))),
    36,
    case=lambda item: (item[0]["direction"], item[1], item[3]),
)


@pytest.mark.parametrize(("direction", "shape", "T", "dtype"), MATRIX)
def test_loss_gradients_and_metrics_are_the_oracles(direction, shape, T, dtype):
    case = Case(dtype=dtype, **SHAPES[shape])
    metrics = case.tokens > 1
    check(case, T, kd_weight=0.8, ce_weight=0.3, metrics=metrics, **direction)


@pytest.mark.parametrize("options", [{"kd_weight": 0.0}, {"ce_weight": 0.0}, {"num_terms": 1000}, {"ignore_index": 3}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options(dtype, options):
    case = Case(dtype=dtype)
    if "ignore_index" in options:
        case.targets[case.targets == -100] = 3
    check(case, 2.0, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_teacher_close_to_the_student(direction):
    """Where p ≈ q the divergence is far below the normalisers it is made of, and T's gradient nearly cancels."""
    case = Case(dtype=torch.float32, vocabulary=3001, tokens=5, masked=(), widths=(8, 8))
    case.tensors["teacher_hidden"] = case.tensors["student_hidden"] + 0.05 * case.tensors["teacher_hidden"]
    case.tensors["teacher_weight"] = case.tensors["student_weight"].clone()
    for T in TEMPERATURES:
        check(case, T, ce_weight=0.0, metrics=False, **direction)


@pytest.mark.full
@pytest.mark.skipif(not FULL, reason="needs some GB")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("T", [1.0, 2.0, 10.0])
def test_a_large_vocabulary(T, direction):
    case = Case(tokens=13, vocabulary=128_256, dtype=torch.float32, widths=(64, 96))
    check(case, T, **direction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_rounds_logits_and_gradients_once(direction, dtype):
    case = Case(dtype=dtype, tokens=40, vocabulary=257, widths=(32, 48))
    out, gradients = ours(case, torch.tensor(2.0), **direction)
    loss, _, want = oracle(case, 2.0, **direction)
    eps = torch.finfo(dtype).eps
    assert relative(out.loss, loss) < eps
    assert out.loss.dtype == torch.float32 and gradients["T"].dtype == torch.float32
    for name in ("hidden", "weight"):
        assert gradients[name].dtype == dtype
        assert relative(gradients[name], want[name]) < 2 * eps


def test_float16_gradients_of_many_terms_neither_underflow_nor_overflow():
    """Divided by the terms before the products, gradients of 1e-9 would be 0 in float16."""
    case = Case(dtype=torch.float16, tokens=40, vocabulary=257, widths=(32, 48))
    _, gradients = ours(case, 2.0, outer=1e6, num_terms=10**6)
    _, _, want = oracle(case, 2.0, outer=1e6, num_terms=10**6)
    for name in ("hidden", "weight"):
        assert relative(gradients[name], want[name]) < 2e-3


def test_finite_differences_of_temperature_bias_and_softcap():
    case = Case(bias=True, scale=1.3, softcap=2.0)
    _, gradients = ours(case, torch.tensor(3.0, dtype=torch.float64), direction="jsd", beta=0.2)
    step = 1e-5

    def loss(T=3.0, bias=None):
        student, teacher = case.heads(case.tensors["student_weight"], case.student_bias if bias is None else bias)
        hidden = (case.tensors["student_hidden"], student, case.targets, case.tensors["teacher_hidden"], teacher)
        with torch.no_grad():
            return distill_loss(*hidden, temperature=T, direction="jsd", beta=0.2).loss

    slope = (loss(T=3.0 + step) - loss(T=3.0 - step)) / (2 * step)
    torch.testing.assert_close(gradients["T"], slope, rtol=1e-7, atol=1e-9)
    for i in (0, 17, 36):
        ahead, behind = case.student_bias.clone(), case.student_bias.clone()
        ahead[i], behind[i] = ahead[i] + step, behind[i] - step
        slope = (loss(bias=ahead) - loss(bias=behind)) / (2 * step)
        torch.testing.assert_close(gradients["bias"][i], slope, rtol=1e-6, atol=1e-9)
