"""What holds for the fused loss whatever the numbers: chunks, order, parts, masks, limits, who gets a gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramian
from gramian.distill import Tail, distill_loss, metrics_of
from gramian.distill.loss import chunked_loss, fused_loss
from gramian.distill.teacher import signal
from tests.distill.loss_cases import Case, ours, relative

DIRECTIONS = ("forward", "reverse", "jsd")
HEAT = torch.tensor(2.5, dtype=torch.float64)


def close(got, want, rtol=1e-12, atol=1e-14):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
@pytest.mark.parametrize("head", [{}, {"bias": True, "softcap": 3.0}])
def test_any_chunking_is_one_chunk(monkeypatch, chunk, head):
    case = Case(**head)
    out, gradients = ours(case, HEAT)
    monkeypatch.setattr(fused_loss, "chunk_tokens", lambda _: chunk)
    parts, part_gradients = ours(case, HEAT)
    close(parts.loss, out.loss)
    close(parts.sums, out.sums)
    for name, gradient in gradients.items():
        close(part_gradients[name], gradient)


def test_the_order_of_tokens_does_not_matter():
    case, other = Case(), Case()
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(1))
    for name in ("student_hidden", "teacher_hidden"):
        other.tensors[name] = case.tensors[name][order]
    other.targets = case.targets[order]
    (out, gradients), (mixed, mixed_gradients) = ours(case, HEAT), ours(other, HEAT)
    close(mixed.loss, out.loss)
    close(mixed.sums, out.sums)
    close(mixed_gradients["hidden"], gradients["hidden"][order])
    close(mixed_gradients["weight"], gradients["weight"])
    close(mixed_gradients["T"], gradients["T"])


@settings(max_examples=6)
@given(cut=st.integers(0, 9), direction=st.sampled_from(DIRECTIONS))
def test_micro_batches_with_common_terms_add_up(cut, direction):
    case = Case()
    terms = torch.tensor(7)
    out, gradients = ours(case, HEAT, direction=direction)
    total, sums, weight, heat, hidden = 0.0, 0.0, 0.0, 0.0, []
    for span in (slice(0, cut), slice(cut, 9)):
        part = Case()
        for name in ("student_hidden", "teacher_hidden"):
            part.tensors[name] = case.tensors[name][span]
        part.targets = case.targets[span]
        part_out, part_gradients = ours(part, HEAT, direction=direction, num_terms=terms)
        total, sums = total + part_out.loss, sums + part_out.sums
        weight, heat = weight + part_gradients["weight"], heat + part_gradients["T"]
        hidden.append(part_gradients["hidden"])
    close(total, out.loss)
    close(sums, out.sums)
    close(weight, gradients["weight"])
    close(heat, gradients["T"])
    close(torch.cat(hidden), gradients["hidden"])
    for name, value in metrics_of(sums).items():
        close(value, getattr(out, name), rtol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masked_tokens_have_no_gradient_and_no_influence(direction):
    case, other = Case(), Case()
    for name in ("student_hidden", "teacher_hidden"):
        other.tensors[name][[2, 5]] = 1e4
    (out, gradients), (same, same_gradients) = (
        ours(case, HEAT, direction=direction),
        ours(other, HEAT, direction=direction),
    )
    assert not gradients["hidden"][[2, 5]].any() and gradients["hidden"][[0, 1, 3]].any()
    close(same.sums, out.sums)
    for name, gradient in gradients.items():
        close(same_gradients[name], gradient)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_token_that_counts_gives_zero(tokens, dtype):
    case = Case(tokens=tokens, masked=tuple(range(tokens)), dtype=dtype, bias=True)
    out, gradients = ours(case, torch.tensor(2.0), num_terms=None)
    assert out.loss == 0 and out.sums[0] == 0
    assert all(not gradient.any() for gradient in gradients.values())
    assert gradients["hidden"].shape == (tokens, 6)
    assert out.kl.isnan() and out.correlation.isnan()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(direction):
    case = Case(widths=(6, 6), dtype=torch.float32)
    case.tensors["teacher_hidden"], case.tensors["teacher_weight"] = (
        case.tensors["student_hidden"].clone(),
        case.tensors["student_weight"].clone(),
    )
    out, gradients = ours(case, torch.tensor(3.0), direction=direction, ce_weight=0.0)
    assert out.loss == 0 and out.kl == 0 and out.agreement == 1
    assert not gradients["hidden"].any() and not gradients["weight"].any()
    close(out.correlation, torch.ones_like(out.correlation), rtol=1e-6)
    close(out.teacher_entropy, out.student_entropy)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_at_infinite_temperature_the_loss_is_the_variance_of_the_difference(direction):
    """T² KL → ½ Var(t − s) over a uniform vocabulary; β(1−β) times that for Jensen-Shannon."""
    case = Case(masked=())
    difference = (
        case.tensors["teacher_hidden"] @ case.tensors["teacher_weight"].T
        - case.tensors["student_hidden"] @ case.tensors["student_weight"].T
    )
    want = 0.5 * difference.var(1, correction=0).mean() * (0.3 * 0.7 if direction == "jsd" else 1)
    out, gradients = ours(case, torch.tensor(1e6, dtype=torch.float64), direction=direction, beta=0.3, ce_weight=0.0)
    torch.testing.assert_close(out.loss, want, rtol=1e-4, atol=0)
    assert abs(gradients["T"]) < 1e-9


def test_the_limits_of_jensen_shannon_are_the_two_divergences():
    case = Case()
    for end, direction in ((0.0, "forward"), (1.0, "reverse")):
        want, want_gradients = ours(case, HEAT, direction=direction)
        got, gradients = ours(case, HEAT, direction="jsd", beta=end)
        assert got.loss == want.loss and gradients["weight"].equal(want_gradients["weight"])
        near = abs(end - 1e-6)
        small, _ = ours(case, HEAT, direction="jsd", beta=near)
        torch.testing.assert_close(small.kl / 1e-6, want.kl, rtol=1e-4, atol=0)


def test_jensen_shannon_at_one_half_is_symmetric():
    case = Case(masked=(), widths=(6, 6))
    other = Case(masked=(), widths=(6, 6))
    for name in ("hidden", "weight"):
        other.tensors[f"student_{name}"] = case.tensors[f"teacher_{name}"]
        other.tensors[f"teacher_{name}"] = case.tensors[f"student_{name}"]
    close(ours(case, HEAT, direction="jsd")[0].kl, ours(other, HEAT, direction="jsd")[0].kl)
    close(ours(case, HEAT, direction="reverse")[0].kl, ours(other, HEAT)[0].kl)


def test_an_untrained_student_starts_at_the_teachers_missing_entropy():
    """KD = T² (ln V − H(p_T)) for a uniform student."""
    case = Case()
    case.tensors["student_weight"].zero_()
    out, _ = ours(case, 3.0, ce_weight=0.0)
    close(out.loss, 9 * (math.log(37) - out.teacher_entropy))
    close(out.ce, torch.tensor(math.log(37), dtype=torch.float64))


def test_a_number_and_a_tensor_of_the_same_temperature_agree():
    case = Case()
    number, tensor = ours(case, 2.5)[0], ours(case, HEAT)[0]
    assert number.loss == tensor.loss and number.sums.equal(tensor.sums)
    whole, _ = ours(case, 2.5, num_terms=7)
    close(whole.loss, number.loss)


def test_only_who_asks_gets_a_gradient():
    case = Case(bias=True)
    names = ("hidden", "weight", "bias")
    _, want = ours(case, HEAT)
    for frozen in names:
        leaves = {
            "hidden": case.tensors["student_hidden"].clone(),
            "weight": case.tensors["student_weight"].clone(),
            "bias": case.student_bias.clone(),
        }
        asked = [leaves[name].requires_grad_() for name in names if name != frozen]
        student, teacher = case.heads(leaves["weight"], leaves["bias"])
        out = distill_loss(
            leaves["hidden"], student, case.targets, case.tensors["teacher_hidden"], teacher, temperature=HEAT
        )
        out.loss.backward()
        assert leaves[frozen].grad is None
        for leaf, name in zip(asked, [name for name in names if name != frozen], strict=True):
            close(leaf.grad, want[name])


def test_without_gradients_nothing_is_saved_and_the_loss_is_the_same(monkeypatch):
    case = Case()
    want, _ = ours(case, 2.5)
    made = []
    keep = chunked_loss.HeadGradients.__init__
    monkeypatch.setattr(
        chunked_loss.HeadGradients, "__init__", lambda self, *args: (made.append(args[2:]), keep(self, *args))[1]
    )
    arguments = (case.tensors["student_hidden"].requires_grad_(), case.tensors["student_weight"], case.targets,
                 case.tensors["teacher_hidden"], case.tensors["teacher_weight"])  # fmt: skip
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = distill_loss(*arguments, temperature=2.5)
        assert not out.loss.requires_grad and out.loss == want.loss and out.sums.equal(want.sums)
    assert made == [(False, False, False)] * 2


def test_a_tied_head_gets_both_gradients_once():
    torch.manual_seed(0)
    embedding = nn.Embedding(37, 6).double()
    tokens, case = torch.randint(37, (9,)), Case()
    hidden = torch.tanh(embedding(tokens))
    arguments = (case.targets, case.tensors["teacher_hidden"], case.tensors["teacher_weight"])
    distill_loss(hidden, embedding.weight, *arguments).loss.backward()
    body, head = (embedding.weight.detach().clone().requires_grad_() for _ in range(2))
    distill_loss(torch.tanh(body[tokens]), head, *arguments).loss.backward()
    close(embedding.weight.grad, body.grad + head.grad)


def test_a_second_backward_is_refused():
    case = Case()
    hidden = case.tensors["student_hidden"].requires_grad_()
    out = distill_loss(
        hidden,
        case.tensors["student_weight"],
        case.targets,
        case.tensors["teacher_hidden"],
        case.tensors["teacher_weight"],
    )
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()
    with pytest.raises(RuntimeError, match="twice|once_differentiable|does not require grad"):
        (gradient,) = torch.autograd.grad(ours_again(case, hidden), hidden, create_graph=True)
        gradient.sum().backward()


def ours_again(case, hidden):
    return distill_loss(
        hidden,
        case.tensors["student_weight"],
        case.targets,
        case.tensors["teacher_hidden"],
        case.tensors["teacher_weight"],
    ).loss


def test_autocast_chooses_the_dtype_of_the_products():
    case = Case(dtype=torch.float32, tokens=33, vocabulary=101, widths=(32, 32))
    half = Case(dtype=torch.float32, tokens=33, vocabulary=101, widths=(32, 32))
    half.tensors = {name: tensor.bfloat16() for name, tensor in case.tensors.items()}
    want, want_gradients = ours(half, torch.tensor(2.0))
    with torch.autocast("cpu", torch.bfloat16):
        out, gradients = ours(case, torch.tensor(2.0))
        exact, _ = ours(Case(), 2.0)
    assert out.loss == want.loss and out.loss.dtype == torch.float32
    assert gradients["weight"].dtype == torch.float32 and gradients["weight"].bfloat16().equal(want_gradients["weight"])
    assert exact.loss == ours(Case(), 2.0)[0].loss  # float64 is left alone


def test_hidden_states_of_a_narrower_dtype_than_their_head():
    case = Case(dtype=torch.float32)
    case.tensors["teacher_hidden"] = case.tensors["teacher_hidden"].bfloat16()
    other = Case(dtype=torch.float32)
    other.tensors["teacher_hidden"] = case.tensors["teacher_hidden"].float()
    assert ours(case, 2.0)[0].loss == ours(other, 2.0)[0].loss


def test_the_weights_gradient_is_added_up_in_float32(monkeypatch):
    """600 chunks that add 2/3 each: in bfloat16 the sum would stop growing at 256."""
    monkeypatch.setattr(fused_loss, "chunk_tokens", lambda _: 1)
    tokens = 600
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.zeros(3, 1, dtype=torch.bfloat16)
    out = distill_loss(hidden, weight, torch.zeros(tokens, dtype=torch.int64), hidden, teacher, ce_weight=1.0)
    assert out.loss.dtype == torch.float32 and out.sums.dtype == torch.float64
    out.loss.backward()
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([-2 / 3, 1 / 3, 1 / 3]), rtol=2**-8, atol=0)


def test_chunks_stay_within_the_stated_bytes():
    for vocabulary in (7, 1000, 32_000, 50_257, 128_256, 256_000, 10**6, 10**9):
        for bytes_per_token in (4 * vocabulary, 48 * vocabulary):
            chunk = chunked_loss.chunk_tokens(bytes_per_token)
            assert chunk * bytes_per_token <= chunked_loss.CHUNK_LIMIT or chunk == 1
            assert chunk >= 1024 or 1024 * bytes_per_token > chunked_loss.CHUNK_LIMIT
    assert chunked_loss.chunk_tokens(4 * 128_256) == chunked_loss.chunk_tokens(4 * 50_257) == 1024


def test_it_is_found_in_the_package():
    assert gramian.distill.distill_loss is distill_loss and Tail is signal.Tail
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gramian.nothing  # noqa: B018


def test_metrics_against_direct_computation():
    """Also where one side's target is unknown to the other: it counts for the cross entropy, not for the correlation."""
    case = Case(tokens=50, teacher_vocabulary=20, masked=(3,))
    out, _ = ours(case, 2.0)
    counted = (case.targets != -100) & (case.targets < 20)
    assert out.sums[6] == counted.sum() < out.sums[0] == 49
    s = (case.tensors["student_hidden"] @ case.tensors["student_weight"].T).log_softmax(1)
    t = (case.tensors["teacher_hidden"] @ case.tensors["teacher_weight"].T).log_softmax(1)
    rows = counted.nonzero()[:, 0]
    pairs = torch.stack([s[rows, case.targets[rows]], t[rows, case.targets[rows]]])
    assert relative(out.correlation, torch.corrcoef(pairs)[0, 1]) < 1e-10
