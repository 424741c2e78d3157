"""Student and loss as one module: against dense softmaxes in float64, for every signal, tied or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gramian.core.errors import GramianError
from gramian.distill.distill_objective import REPORTED_SUMS, DistillObjective
from gramian.distill.loss import fused_loss as loss_module
from gramian.distill.loss.feature_loss import FeatureLoss
from gramian.distill.teacher.language_model import body_of
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, SampledSignal, Signal, SparseSignal
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.train.loop.objective import IGNORED, logits_of
from tests.distill.teachers import TEACHERS, VOCABULARY, batch_of, gpt, is_frozen, windows
from tests.distill.test_features import gram_debiased_cka, standardised

STUDENTS = ["gpt", "gpt tied", "goose", "phi, with a bias", "gemma2, capped", "cohere, scaled"]


def batch() -> dict[str, Tensor]:
    found = batch_of(windows(), [3, 1, 7])
    found["targets"][0, 5:] = IGNORED
    return found


def model_of(family: str) -> nn.Module:
    return TEACHERS[family]().double().train()


def dense(layers: tuple[int, ...] = ()) -> tuple[LiveTeacher, DenseSignal, Tensor]:
    teacher = LiveTeacher(gpt(width=8).double(), layers)
    told = batch()
    return teacher, teacher(told), logits_of(teacher.model, told["tokens"])


@pytest.mark.oracle
@pytest.mark.parametrize("family", STUDENTS)
def test_the_loss_is_that_of_dense_softmaxes_with_its_gradient(family: str) -> None:
    """Also the embedding's, where the head is tied to it."""
    told, (_, signal, teacher_BTV) = batch(), dense()
    options, coefficient = RowObjective(kd_weight=0.7, ce_weight=0.4), 1 / 31
    temperature = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    model = model_of(family)
    module = DistillObjective(model, options)
    loss, sums = module(told["tokens"], told["targets"], coefficient, signal=signal, temperature=temperature)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    slope = temperature.grad
    model.zero_grad()

    counted = told["targets"] != IGNORED
    at = temperature.detach().clone().requires_grad_()
    logits = logits_of(model, told["tokens"])[counted]
    log_p, log_q = ((t / at).log_softmax(-1) for t in (teacher_BTV[counted], logits))
    kl = (log_p.exp() * (log_p - log_q)).sum()
    ce = F.cross_entropy(logits, told["targets"][counted], reduction="sum")
    expected = coefficient * (0.7 * at**2 * kl + 0.4 * ce)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert slope is not None and at.grad is not None and slope.item() == pytest.approx(at.grad.item(), rel=1e-8)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-7, atol=1e-10, msg=name)
    values = dict(zip(REPORTED_SUMS, sums.tolist(), strict=True))
    assert values["nats"] == values["ce"] == pytest.approx(ce.item())
    assert values["kl"] == pytest.approx(kl.item()) and values["terms"] == counted.sum() and values["feature_loss"] == 0


@pytest.mark.parametrize("family", STUDENTS)
def test_without_a_signal_it_is_the_cross_entropy(family: str) -> None:
    told, model = batch(), model_of(family)
    loss, nats = DistillObjective(model, RowObjective())(told["tokens"], told["targets"], 0.5)
    logits = logits_of(model, told["tokens"]).flatten(0, 1)
    expected = F.cross_entropy(logits, told["targets"].flatten(), ignore_index=IGNORED, reduction="sum")
    assert nats.shape == () and not nats.requires_grad
    assert (loss.item(), nats.item()) == (pytest.approx(0.5 * expected.item()), pytest.approx(expected.item()))


class Largest(TorchDispatchMode):
    """Most rows of any tensor over the vocabulary that was made, and is no view of another."""

    rows = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        found = function(*arguments, **(named or {}))
        made = isinstance(found, Tensor) and not function.is_view
        if made and found.dim() == 2 and found.shape[1] == VOCABULARY:
            self.rows = max(self.rows, found.shape[0])
        return found


@pytest.mark.parametrize("taught", [True, False])
def test_logits_of_all_tokens_are_never_held(taught: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a step nor in an evaluation, which may see as many tokens."""
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda _: 4)
    told, (_, signal, _) = batch(), dense()
    module = DistillObjective(model_of("gpt"), RowObjective())
    with Largest() as largest:
        module(told["tokens"], told["targets"], 0.5, signal=signal if taught else None)
    assert 0 < largest.rows <= 4


def test_sparse_and_sampled_signals_are_read() -> None:
    """All ids kept, or all drawn with their probabilities: the dense teacher again."""
    told, (_, signal, teacher_BTV) = batch(), dense()
    module = DistillObjective(model_of("gpt"), RowObjective(ce_weight=0.0))
    ids_BTK = torch.arange(VOCABULARY).expand_as(teacher_BTV)
    weights_BTK = (teacher_BTV / 2).softmax(-1)

    def loss_of(each: Signal) -> float:
        return module(told["tokens"], told["targets"], 0.1, signal=each, temperature=2.0)[0].item()

    expected = loss_of(signal)
    assert loss_of(SparseSignal(ids_BTK, teacher_BTV, None)) == pytest.approx(expected, rel=1e-6)
    counted = told["targets"] != IGNORED
    entropy = -(weights_BTK * weights_BTK.log()).sum(-1)[counted].sum().item()
    assert loss_of(SampledSignal(ids_BTK, weights_BTK, 2.0)) == pytest.approx(expected + 0.1 * 4 * entropy, rel=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_features_are_weighted_by_tokens_and_every_projector_has_a_gradient(weight: float) -> None:
    """Also while they are off: DDP waits for every parameter."""
    told, (_, signal, _) = batch(), dense((1,))
    features = FeatureLoss("hidden", [(2, 1)], 16, 8).double()
    module = DistillObjective(model_of("gpt"), RowObjective(), features)
    arguments: dict[str, Any] = {"signal": signal, "temperature": 2.0, "feature_weight": weight}
    loss, sums = module(told["tokens"], told["targets"], 0.1, **arguments)
    plain = DistillObjective(module.model, RowObjective())(
        told["tokens"], told["targets"], 0.1, signal=signal, temperature=2.0
    )
    count = int((told["targets"] != IGNORED).sum())
    distance = float(sums[REPORTED_SUMS.index("feature_loss")]) / count
    assert loss.item() - plain[0].item() == pytest.approx(weight * 0.1 * count * distance, rel=1e-6, abs=1e-12)
    assert (distance > 0) == (weight > 0)
    loss.backward()
    for p in features.parameters():
        assert p.grad is not None and bool(p.grad.any()) == (weight > 0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_compiled_student_has_its_features_when_they_begin(family: str) -> None:
    """A step without them, an evaluation, then a step with them: forwards that were compiled before."""
    told, (_, signal, _) = batch(), dense((1,))
    found = []
    for compiled in (False, True):
        model = model_of(family)
        if compiled and family == "gpt":
            model.hidden = torch.compile(model.hidden, backend="eager")
        elif compiled:
            body_of(model).compile(backend="eager")
        module = DistillObjective(model, RowObjective(), FeatureLoss("cka", [(2, 1)], 16, 8))
        step: dict[str, Any] = {"signal": signal, "temperature": 2.0}
        module(told["tokens"], told["targets"], 0.1, **step)[0].backward()
        with torch.no_grad():
            module(told["tokens"], told["targets"], 0.1)
        loss, _ = module(told["tokens"], told["targets"], 0.1, **step, feature_weight=0.5)
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_features_of_inference_mode_are_refused_in_one_line() -> None:
    """Autograd would save them; without features nothing of the signal is saved."""
    told, (teacher, _, _) = batch(), dense((1,))
    with torch.inference_mode():
        plain = teacher(told)
        signal = DenseSignal(plain.hidden_BTD * 1, plain.head, {1: plain.layers[1] * 1})
    module = DistillObjective(model_of("gpt"), RowObjective(), FeatureLoss("cka", [(2, 1)], 16, 8))
    module(told["tokens"], told["targets"], 0.1, signal=signal)[0].backward()
    with pytest.raises(GramianError, match="^teacher: its signal was made in inference mode"):
        module(told["tokens"], told["targets"], 0.1, signal=signal, feature_weight=1.0)


def test_to_compare_is_the_similarity_of_final_hidden_states() -> None:
    told, (teacher, signal, _) = batch(), dense()
    model = model_of("gpt")
    found, _ = DistillObjective(model, RowObjective())(
        told["tokens"], told["targets"], 1.0, signal=signal, compare=True
    )
    counted = told["targets"] != IGNORED
    hidden, _ = model.hidden(told["tokens"], None, ())  # type: ignore[operator]
    x, y = hidden[counted][:14], signal.hidden_BTD[counted][:14]
    some = torch.zeros_like(counted)
    some.view(-1)[counted.view(-1).nonzero().flatten()[:14]] = True
    targets = torch.where(some, told["targets"], IGNORED)
    few, _ = DistillObjective(model, RowObjective())(told["tokens"], targets, 1.0, signal=signal, compare=True)
    assert few.item() == pytest.approx(gram_debiased_cka(standardised(x), standardised(y)).item(), rel=1e-6)
    assert abs(found.item()) < 1
    own = DenseSignal(hidden.detach().float(), signal.head)  # narrower than the student
    assert DistillObjective(model, RowObjective())(told["tokens"], told["targets"], 1.0, signal=own, compare=True)[
        0
    ].item() == pytest.approx(1, abs=1e-4)
    assert is_frozen(teacher)
