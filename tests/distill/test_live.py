"""A live teacher: frozen, without gradients, the same whatever is around it."""

import pytest
import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, SampledSignal, SparseSignal, Tail, refuse_inference, tensors_of
from tests.distill.teachers import TEACHERS, batch_of, gpt, huggingface, is_frozen, windows

families = pytest.mark.parametrize("family", ["gpt", "goose", "gpt2", "gemma2, capped"])


def same(one: DenseSignal, other: DenseSignal) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return list(one.layers) == list(other.layers) and all(torch.equal(a, b) for a, b in pairs)


@families
def test_it_gives_the_models_logits_and_layers(family: str) -> None:
    model, batch = TEACHERS[family](), batch_of(windows(), [3, 1])
    with torch.no_grad():
        found = model(batch["tokens"])
    own_BTV = found if isinstance(found, torch.Tensor) else found.logits
    signal = LiveTeacher(model, layers=(2, 0))(batch)
    assert torch.allclose(signal.head.logits(signal.hidden_BTD), own_BTV, atol=1e-5)
    assert sorted(signal.layers) == [0, 2]
    assert all(stream.shape == signal.hidden_BTD.shape for stream in signal.layers.values())


@families
def test_it_is_frozen_and_stays_so(family: str) -> None:
    model = TEACHERS[family]().train()
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    else:
        model.checkpoint_blocks = 1
    teacher = LiveTeacher(model)
    assert is_frozen(teacher)
    assert not getattr(model, "is_gradient_checkpointing", False) and not getattr(model, "checkpoint_blocks", 0)
    batch = batch_of(windows(), [0])
    before = teacher(batch)
    nn.ModuleList([model]).train()  # a module that contains it
    assert not is_frozen(teacher)
    assert same(teacher(batch), before) and is_frozen(teacher)
    assert not any(tensor.requires_grad for tensor in (*tensors_of(before), before.head.weight_VD))
    model.get_input_embeddings().weight.requires_grad_(True) if hasattr(model, "get_input_embeddings") else (
        model.token_embedding.weight.requires_grad_(True)
    )
    assert not is_frozen(teacher)


def test_dropout_is_off() -> None:
    batch = batch_of(windows(), [0, 1])
    assert same(LiveTeacher(gpt(dropout=0.9).train())(batch), LiveTeacher(gpt())(batch))


def test_documents_reach_the_model() -> None:
    data = windows(isolate=True)
    teacher, batch = LiveTeacher(gpt()), batch_of(windows(isolate=True), [4, 5])
    assert "documents" in data[0]
    assert not same(teacher(batch), teacher({name: rows for name, rows in batch.items() if name != "documents"}))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_is_around_a_call_changes_nothing(autocast: torch.dtype | None) -> None:
    teacher, batch = LiveTeacher(gpt(), layers=(1,), autocast=autocast), batch_of(windows(), [0, 7])
    plain = teacher(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(teacher(batch), plain)
    with torch.inference_mode():
        inside = teacher(batch)
    assert same(inside, plain)
    refuse_inference(inside)
    with torch.enable_grad():
        assert teacher(batch).hidden_BTD.grad_fn is None
    assert same(plain, LiveTeacher(gpt(), layers=(1,))(batch)) == (autocast is None)
    assert plain.hidden_BTD.dtype == plain.head.weight_VD.dtype


def test_a_learner_may_save_the_signal_for_its_backward() -> None:
    temperature = torch.tensor(2.0, requires_grad=True)
    teacher = LiveTeacher(gpt())
    with torch.inference_mode():
        signal = teacher(batch_of(windows(), [0]))
    (signal.head.logits(signal.hidden_BTD) / temperature).logsumexp(-1).sum().backward()
    assert temperature.grad is not None


def test_announcing_a_batch_changes_nothing() -> None:
    teacher, plain = LiveTeacher(gpt(), layers=(1,)), LiveTeacher(gpt(), layers=(1,))
    batches = [batch_of(windows(), [i, i + 1]) for i in range(3)]
    teacher.upcoming(batches[0])
    for i, batch in enumerate(batches):
        signal = teacher(batch)
        if i < 2:
            teacher.upcoming(batches[i + 1])
        assert same(signal, plain(batch))


@pytest.mark.gpu
def test_announcing_a_batch_changes_nothing_on_a_gpu() -> None:
    teacher = LiveTeacher(gpt(width=256, layers=8, context=256), layers=(1,), device="cuda", autocast=torch.bfloat16)
    plain = LiveTeacher(gpt(width=256, layers=8, context=256), layers=(1,), device="cuda", autocast=torch.bfloat16)
    data = windows(count=64, length=256)
    batches = [{n: t.cuda() for n, t in batch_of(data, list(range(i, i + 8))).items()} for i in range(0, 40, 8)]
    expected = [plain(batch) for batch in batches]
    teacher.upcoming(batches[0])
    for i, batch in enumerate(batches):
        signal = teacher(batch)
        if i + 1 < len(batches):
            teacher.upcoming(batches[i + 1])
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(8):  # beside which the next forward runs
            busy = busy @ busy / 64.0
        assert same(signal, expected[i])
        assert same(teacher(batches[0]), expected[0])  # asked for without notice, in between


@pytest.mark.full
def test_compiling_changes_rounding_at_most() -> None:
    batch = batch_of(windows(), [0, 1])
    for family in ("gpt", "llama"):
        one, other = LiveTeacher(TEACHERS[family](), compile=True)(batch), LiveTeacher(TEACHERS[family]())(batch)
        assert torch.allclose(one.hidden_BTD, other.hidden_BTD, atol=1e-5)


def test_weights_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = huggingface("Llama")
    with pytest.raises(GramianError, match=r"^teacher: .* was made in inference mode.*expected torch.no_grad"):
        LiveTeacher(model)


@pytest.mark.parametrize("place", range(7))
def test_signals_of_inference_mode_are_refused_before_anything_learns(place: int) -> None:
    teacher = LiveTeacher(gpt(), layers=(1,))
    ids, plain = torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, 3)
    with torch.inference_mode():
        made = torch.zeros(1, 2, 3)
        made_ids = torch.zeros(1, 2, 3, dtype=torch.long)
    tail = Tail(plain, plain, torch.zeros(3))
    signals = [
        DenseSignal(made, teacher.head),
        DenseSignal(plain, teacher.head, {1: made}),
        SparseSignal(ids, made, tail),
        SparseSignal(made_ids, plain, tail),
        SparseSignal(ids, plain, Tail(made, plain, torch.zeros(3))),
        SparseSignal(ids, plain, Tail(plain, made, torch.zeros(3))),
        SampledSignal(ids, made, 1.0),
    ]
    with pytest.raises(GramianError, match="^teacher: its signal was made in inference mode"):
        refuse_inference(signals[place])
    for fine in (
        DenseSignal(plain, teacher.head, {1: plain}),
        SparseSignal(ids, plain, tail),
        SampledSignal(ids, plain, 1.0),
    ):
        refuse_inference(fine)


def test_layers_are_checked_when_it_is_made() -> None:
    with pytest.raises(GramianError, match="^layers:"):
        LiveTeacher(gpt(), layers=(9,))
