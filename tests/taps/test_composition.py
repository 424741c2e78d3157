"""Taps beside the rest of training: checkpointing, in-place operations, autocast, scalers, accumulation, other captures."""

import contextlib
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import gramian
from gramian.taps import Withheld, hub_of
from tests.kit.matrix import sample, some
from tests.kit.models import CASES
from tests.kit.networks import GPT
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.oracles import sample_statistics
from tests.taps.checks import (
    assert_exact,
    assert_norms,
    assert_same_bits,
    captured,
    gradients,
    loop_norms,
    problem,
    wave,
)

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]


def _squares(model: nn.Module, x: Tensor, reduction: str = "sum") -> Tensor:
    return model(x).square().sum() / (max(len(x), 1) if reduction == "mean" else 1)


# ---- checkpointing --------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Calls each of its parts through a checkpoint."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


def _parts(kind: str) -> list[nn.Module]:
    shared = nn.Linear(6, 6)
    return {
        "linears": lambda: [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), nn.Linear(6, 4)],
        "norms": lambda: [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6)), nn.Linear(6, 4)],
        "reused": lambda: [nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Tanh(), shared)],
        "generic": lambda: [nn.Sequential(nn.Linear(6, 6), nn.PReLU()), nn.PReLU(5)],
        "attention": lambda: [nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)],
        "inplace": lambda: [nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 6))],
        "nested": lambda: [Checkpointed(nn.Linear(6, 6), Checkpointed(nn.Linear(6, 5)))],
    }[kind]()


KINDS = ["linears", "norms", "reused", "generic", "attention", "inplace", "nested"]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_inside_a_checkpoint_are_counted_once_and_exact(kind: str, early_stop: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(*_parts(kind)).double()
    with set_checkpoint_early_stop(early_stop):
        norms = assert_exact(model, torch.randn(3, 5, 6, dtype=torch.float64))
    for name, cover in norms.coverage.items():
        assert cover.status == "covered" and cover.uses == (3 if kind == "reused" else 1), name


@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "mha", "convnet"])
def test_a_whole_model_inside_a_checkpoint_is_exact(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    with gramian.per_sample_norms(model) as norms:
        checkpoint(partial(loss, reduction="mean"), model, *batch, use_reentrant=False).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_checkpointed_blocks_of_a_gpt_with_accumulation_are_exact() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    expected = loop_norms(model, loss, batch)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with gramian.per_sample_norms(model) as norms:
        for part in (slice(0, 3), slice(3, 4)):
            loss(model, *(t[part] for t in batch), reduction="mean").backward()
    assert_norms(norms.values, expected)
    assert norms.coverage["blocks.0.fc.weight"].uses == 1


def test_activations_inside_a_checkpoint_are_not_kept_by_the_capture() -> None:
    hidden: list[weakref.ref[Tensor]] = []

    def watched(net: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        hidden.append(weakref.ref(y))
        return y

    model = Checkpointed(nn.Sequential(nn.Linear(6, 9), Toy(watched), nn.Linear(9, 6)), nn.Linear(6, 3))
    with gramian.per_sample_norms(model):
        loss = model(torch.randn(3, 6)).sum()
        assert hidden and all(ref() is None for ref in hidden)  # nor those of the proof
        loss.backward()
        hidden.clear()
        loss = model(torch.randn(3, 6)).sum()
        assert [ref() for ref in hidden] == [None]
        loss.backward()


class WhenHandedOn(gramian.DiagonalFisher):
    """Notes, for each parameter it is shown, which gradients autograd has finished by then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.finished = model, {}

    def update(self, sums: Any, record: Any) -> None:
        self.finished[record.parameter] = {n for n, p in self.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inside", [False, True])
def test_a_parameter_that_is_used_once_is_handed_on_during_the_backward_not_after_it(inside: bool) -> None:
    parts = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model = Checkpointed(*parts) if inside else nn.Sequential(*parts)
    statistic = WhenHandedOn(model)
    with gramian.observe(model, statistic):
        _squares(model, torch.randn(3, 6)).backward()
    assert len(statistic.finished) == 6
    first, last = (f"{'parts.' if inside else ''}{name}.weight" for name in ("0.0", "1.2"))
    assert first not in statistic.finished[first]
    assert statistic.finished[last] <= {last, last.replace("weight", "bias")}


# ---- memory ---------------------------------------------------------------------------------------------------------


def _saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd saves in a forward."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        alive.append(t)
        return t

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(storages.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["mlp", "linear_3d", "gpt", "tied_gpt", "conv2d", "convnet", "lora", "reused"])
def test_a_capture_saves_no_tensor_that_autograd_does_not_save_anyway(name: str, bf16: bool) -> None:
    model, batch, loss = problem(CASES[name], dtype=torch.float32)

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return loss(model, *batch, reduction="mean")

    plain = _saved_bytes(lambda: run(deepcopy(model)))
    with gramian.per_sample_norms(model):
        tapped = _saved_bytes(lambda: run(model))
        run(model).backward()
    # Two exceptions: under autocast a norm layer's input is read as float32 and kept as the bf16 tensor that it is; a
    # convolution that pads other than with zeros keeps its input beside the padded one.
    norms = any(isinstance(m, nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d) for m in model.modules())
    pads = any(getattr(m, "padding_mode", "zeros") != "zeros" for m in model.modules())
    allowed = plain * (1.0 + 0.25 * (bf16 and norms) + 0.1 * pads)
    assert tapped <= allowed, (tapped, plain)


class Recording(gramian.Health):
    """Remembers the dtypes it was handed."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def update(self, sums: Any, record: Any) -> None:
        self.seen[record.layer] = (record.inputs[0].dtype, record.output_gradients[0].dtype)


def test_under_autocast_the_input_that_is_kept_is_the_half_one() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 4, 1), nn.Flatten())
    recording = Recording()
    with gramian.observe(model, recording):
        with torch.autocast("cpu", torch.bfloat16):
            value = model(torch.randn(3, 6)).float().square().sum()
        value.backward()
    assert recording.seen == {"0": (torch.bfloat16,) * 2, "3": (torch.bfloat16,) * 2}


def test_tensors_that_autograd_moves_away_and_back_are_read_as_they_come_back() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    with gramian.per_sample_norms(model) as norms, torch.autograd.graph.save_on_cpu():
        loss(model, *batch, reduction="mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


@pytest.mark.parametrize("name", ["tied_gpt", "vit"])
def test_anomaly_detection_may_be_on(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    with gramian.per_sample_norms(model) as norms, torch.autograd.set_detect_anomaly(True):
        loss(model, *batch, reduction="mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


# ---- in-place operations --------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Changes the output of a layer in every way autograd allows."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.how == "activation":
            return F.relu_(y)
        if self.how == "add":
            y += 1
            return y * y
        if self.how == "assign":
            y[..., 0] = 0
            return y.tanh()
        if self.how == "through a view":
            y.flatten(1)[:, ::2].mul_(2)
            return y.tanh()
        y.masked_fill_(y < 0, 0.5)
        return y.tanh()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "embedding": (lambda: nn.Embedding(6, 5), (4,)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 6)),
    "conv": (lambda: nn.Conv1d(4, 6, 2), (4, 6)),
    "generic": (lambda: nn.Sequential(nn.Bilinear(6, 6, 5)), (4, 6)),
}


@pytest.mark.parametrize(
    "layer, how",
    sample([(a, b) for a in LAYERS for b in ("activation", "add", "assign", "through a view", "masked fill")], 18),
)
def test_in_place_operations_on_the_output_of_a_layer_are_exact(layer: str, how: str) -> None:
    torch.manual_seed(1)
    make, shape = LAYERS[layer]
    inner = make()
    if layer == "generic":
        bilinear = inner[0]
        inner = Toy(lambda net, x: net.layer(x, x), layer=bilinear)
    x = torch.randint(6, (3, *shape)) if layer == "embedding" else torch.randn(3, *shape, dtype=torch.float64)
    if layer == "layer norm" and how in ("add", "activation"):
        inner = nn.Sequential(nn.Linear(6, 6), inner)
    assert_exact(InPlace(inner, how).double(), x)


def test_an_input_changed_in_place_behind_its_layer_is_torchs_own_error() -> None:
    model = nn.Linear(5, 4)
    x = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), gramian.per_sample_norms(model):
        loss = model(x).sum()
        x.add_(1)
        loss.backward()


# ---- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1.0, 512.0, 1e-3, 3])
def test_a_loss_scale_is_divided_out(scale: float, reduction: str) -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    with gramian.per_sample_norms(model, loss_reduction=reduction, loss_scale=scale) as norms:
        (scale * loss(model, *batch, reduction=reduction)).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "linear_3d", "tied_gpt", "conv2d"])
def test_the_scale_of_a_grad_scaler_is_divided_out_also_when_it_changes_between_steps(
    name: str, half: torch.dtype
) -> None:
    model, batch, loss = problem(CASES[name], dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scales = []
    with gramian.per_sample_norms(model, loss_scale=scaler) as norms:
        for _ in range(2):
            with torch.autocast("cpu", half):
                value = loss(model, *batch, reduction="mean")
            scaler.scale(value).backward()
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scales == [256.0, 512.0]
    expected = loop_norms(model, loss, batch)
    assert_norms(norms.values, torch.cat([expected, expected]), 1e-2)


def test_a_scaler_that_was_never_used_or_is_disabled_has_its_own_scale() -> None:
    model, batch, loss = problem(CASES["mlp"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with gramian.per_sample_norms(model, loss_scale=scaler) as norms:
        scaler.scale(loss(model, *batch, reduction="mean")).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_gradients_that_overflow_are_reported_as_such_and_do_not_stop_the_step() -> None:
    model, batch, loss = problem(CASES["linear_3d"], dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with gramian.per_sample_norms(model, loss_scale=scaler) as norms:
        with torch.autocast("cpu", torch.float16):
            value = loss(model, *batch, reduction="mean")
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not norms.values.isfinite().any()
    assert scaler.get_scale() == 2.0**59
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# ---- accumulation and order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(list(CASES), 8, case=lambda name: "any"))
def test_several_backwards_are_concatenated_in_order_and_p_grad_accumulates_as_usual(name: str) -> None:
    case = CASES[name]
    model, batch, loss = problem(case, samples=5)
    untouched = deepcopy(model)
    expected = loop_norms(model, loss, batch)
    parts = [tuple(t[part] for t in batch) for part in (slice(0, 2), slice(2, 3), slice(3, 5))]
    with gramian.per_sample_norms(model) as norms:
        for part in parts:
            loss(model, *part, reduction="mean").backward()
    for part in parts:
        loss(untouched, *part, reduction="mean").backward()
    assert_norms(norms.values, expected, 1e-6 if case.computes_in_float32 else 1e-9)
    if name != "broadcast":
        assert_same_bits(gradients(model), gradients(untouched))


@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused", "mha", "broadcast", "vit"])
@pytest.mark.parametrize("order", ["one backward", "forward order", "reverse order"])
def test_several_forwards_before_a_backward_are_distinguished_and_come_in_the_order_of_the_forwards(
    name: str, order: str
) -> None:
    model, batch, loss = problem(CASES[name], samples=5)
    expected = loop_norms(model, loss, batch)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        losses = [loss(model, *(t[p] for t in batch), reduction="sum") for p in (slice(0, 2), slice(2, 5))]
        if order == "one backward":
            (losses[0] + losses[1]).backward()
        else:
            for value in losses if order == "forward order" else reversed(losses):
                value.backward()
    assert_norms(norms.values, expected)


def test_a_forward_that_is_never_differentiated_leaves_no_trace() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    with gramian.per_sample_norms(model) as norms:
        loss(model, *batch, reduction="mean")
        loss(model, *batch, reduction="mean").backward()
        loss(model, *batch, reduction="mean")
    assert_norms(norms.values, loop_norms(model, loss, batch))
    assert norms.coverage["tokens.weight"].uses == 2


def test_part_of_a_forward_that_gets_no_gradient_is_left_out() -> None:
    def branches(net: Any, x: Tensor) -> Tensor:
        net.right(net.shared(x.flip(1)))
        with torch.no_grad():
            net.left(net.shared(x))
        return net.left(net.shared(x))

    norms = assert_exact(
        Toy(branches, shared=nn.Linear(5, 4), left=nn.Linear(4, 3), right=nn.Linear(4, 3)).double(),
        torch.randn(3, 5, dtype=torch.float64),
    )
    assert norms.coverage["shared.weight"].uses == 1
    assert norms.coverage["right.weight"].status == "unused"


def test_values_can_be_read_between_backwards() -> None:
    model, batch, loss = problem(CASES["mlp"])
    expected = loop_norms(model, loss, batch)
    with gramian.per_sample_norms(model) as norms:
        loss(model, *batch, reduction="mean").backward()
        assert_norms(norms.values, expected)
        loss(model, *batch, reduction="mean").backward()
        assert_norms(norms.values, torch.cat([expected, expected]))


def test_training_with_an_optimizer_inside_a_capture_takes_the_steps_it_would_take() -> None:
    model, batch, loss = problem(CASES["gpt"], dtype=torch.float32)
    untouched = deepcopy(model)
    for m, context in ((model, gramian.per_sample_norms(model)), (untouched, contextlib.nullcontext())):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        with context:
            for _ in range(3):
                optimizer.zero_grad()
                loss(m, *batch, reduction="mean").backward()
                optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))


# ---- several captures -----------------------------------------------------------------------------------------------


class Counting(gramian.Health):
    """Counts what it is shown."""

    def __init__(self) -> None:
        self.uses = 0

    def update(self, sums: Any, record: Any) -> None:
        self.uses += 1


def _observers(t: Tensor) -> int:
    """Observers in the graph behind a tensor."""
    seen, stack, count = set(), [t.grad_fn], 0
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += "Observe" in node.name()
        stack.extend(following for following, _ in node.next_functions)
    return count


def test_captures_of_different_objects_share_one_tap_and_one_backward() -> None:
    model, batch, loss = problem(CASES["gpt"])
    expected = loop_norms(model, loss, batch)
    fisher, counting = gramian.DiagonalFisher(), Counting()
    with gramian.per_sample_norms(model) as alone:
        value = loss(model, *batch, reduction="mean")
        observers = _observers(value)
        value.backward()
    with (
        gramian.per_sample_norms(model, algorithm="gram") as outer,
        gramian.observe(model, fisher, counting) as seen,
        gramian.per_sample_norms(model, algorithm="direct") as inner,
    ):
        value = loss(model, *batch, reduction="mean")
        assert _observers(value) == observers
        value.backward()
    for norms in (alone, outer, inner):
        assert_norms(norms.values, expected)
    assert counting.uses == observers
    diagonal = sample_statistics.diagonal_fisher(model, partial(loss, reduction="sum"), batch)
    for name, found in seen[fisher].items():
        torch.testing.assert_close(found, diagonal[name] / 4, rtol=1e-9, atol=1e-15)


def test_captures_may_read_one_backward_in_different_ways() -> None:
    model, batch, loss = problem(CASES["mlp"])
    with (
        gramian.per_sample_norms(model, loss_reduction="mean") as mean,
        gramian.per_sample_norms(model, loss_reduction="sum") as total,
        gramian.per_sample_norms(model, loss_reduction="sum", loss_scale=2.0) as scaled,
    ):
        loss(model, *batch, reduction="mean").backward()
    expected = loop_norms(model, loss, batch)
    assert_norms(mean.values, expected)
    assert_norms(total.values, expected / 4)
    assert_norms(scaled.values, expected / 8)


@pytest.mark.parametrize("first_out", ["inner", "outer"])
def test_captures_may_be_left_in_either_order(first_out: str) -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    expected = loop_norms(model, loss, batch)
    outer, inner = gramian.per_sample_norms(model), gramian.per_sample_norms(model, algorithm="gram")
    outer.__enter__()
    loss(model, *batch, reduction="mean").backward()
    inner.__enter__()
    loss(model, *batch, reduction="mean").backward()
    first, second = (inner, outer) if first_out == "inner" else (outer, inner)
    first.__exit__(None, None, None)
    loss(model, *batch, reduction="mean").backward()
    second.__exit__(None, None, None)
    assert all("forward" not in m.__dict__ for m in model.modules())
    lengths = {"inner": (3, 1), "outer": (2, 2)}[first_out]
    assert_norms(outer.values, torch.cat([expected] * lengths[0]))
    assert_norms(inner.values, torch.cat([expected] * lengths[1]))


def test_a_capture_entered_between_forward_and_backward_does_not_see_that_pass() -> None:
    model, batch, loss = problem(CASES["mlp"])
    with gramian.per_sample_norms(model) as outer:
        value = loss(model, *batch, reduction="mean")
        with refusal("^capture: no backward"), gramian.per_sample_norms(model):
            value.backward()
    assert_norms(outer.values, loop_norms(model, loss, batch))


def test_a_capture_left_between_forward_and_backward_does_not_disturb_the_other() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    with gramian.per_sample_norms(model) as outer:
        with refusal("^capture: no backward"), gramian.per_sample_norms(model):
            value = loss(model, *batch, reduction="mean")
        value.backward()
    assert_norms(outer.values, loop_norms(model, loss, batch))


def test_a_backward_after_the_capture_is_left_is_an_ordinary_one() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    untouched = deepcopy(model)
    with gramian.per_sample_norms(model) as norms:
        loss(model, *batch, reduction="mean").backward()
        late = loss(model, *batch, reduction="mean")
    late.backward()
    for _ in range(2):
        loss(untouched, *batch, reduction="mean").backward()
    assert norms.values.shape == (4,)
    assert_same_bits(gradients(model), gradients(untouched))


def test_two_models_are_captured_independently() -> None:
    (model, batch, loss), (other, others, other_loss) = problem(CASES["gpt"]), problem(CASES["mlp"], samples=3)
    with gramian.per_sample_norms(model) as norms, gramian.per_sample_norms(other) as other_norms:
        (loss(model, *batch, reduction="mean") + other_loss(other, *others, reduction="mean")).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))
    assert_norms(other_norms.values, loop_norms(other, other_loss, others))


def test_a_student_and_a_frozen_teacher_of_the_same_class_are_distinguished() -> None:
    torch.manual_seed(2)
    student, teacher = GPT(tied=False).double(), GPT(tied=False).double().requires_grad_(False)
    ids = torch.randint(13, (3, 6))

    def loss(model: nn.Module, ids: Tensor, reduction: str) -> Tensor:
        terms_B = (model(ids) - teacher(ids)).square().flatten(1).sum(1)
        return terms_B.sum() if reduction == "sum" else terms_B.mean()

    with gramian.per_sample_norms(student) as norms:
        loss(student, ids, "mean").backward()
    assert_norms(norms.values, loop_norms(student, loss, (ids,)))


# ---- randomness -----------------------------------------------------------------------------------------------------


def test_with_dropout_between_layers_the_norms_are_those_of_the_numbers_that_were_drawn() -> None:
    model = nn.Sequential(
        nn.Embedding(9, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 5)
    ).double()
    x = torch.randint(9, (4, 6))
    with torch.random.fork_rng(), gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        torch.manual_seed(3)
        _squares(model, x).backward()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        terms_B = model(x).square().flatten(1).sum(1)
    rows = [torch.autograd.grad(term, list(model.parameters()), retain_graph=True) for term in terms_B]
    expected = torch.stack([torch.stack([g.square().sum() for g in row]).sum().sqrt() for row in rows])
    assert_norms(norms.values, expected)


# ---- gradients elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "linear_3d", "convnet", "vit", "mha", "windows", "tied_linears"])
def test_gradients_with_respect_to_inputs_are_those_of_an_untouched_copy(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    untouched = deepcopy(model)
    inputs, copies = ([t.clone().requires_grad_() for t in batch[:-1]] for _ in range(2))
    with gramian.per_sample_norms(model) as norms:
        loss(model, *inputs, batch[-1], reduction="mean").backward()
    loss(untouched, *copies, batch[-1], reduction="mean").backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(inputs, copies, strict=True))
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_autograd_grad_of_the_parameters_is_a_backward_like_any_other() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    with gramian.per_sample_norms(model) as norms:
        found = torch.autograd.grad(loss(model, *batch, reduction="mean"), list(model.parameters()))
    assert_norms(norms.values, loop_norms(model, loss, batch))
    assert all(p.grad is None for p in model.parameters())
    assert len(found) == len(list(model.parameters()))


def test_autograd_grad_of_the_inputs_alone_is_no_false_alarm_of_the_audit() -> None:
    model, (x, y), loss = problem(CASES["mlp"])
    x.requires_grad_()
    with gramian.per_sample_norms(model) as norms:
        torch.autograd.grad(loss(model, x, y, reduction="mean"), x)
    assert_norms(norms.values, loop_norms(model, loss, (x.detach(), y)))


def test_a_functional_call_with_other_parameters_has_the_norms_of_those() -> None:
    model, (x, y), loss = problem(CASES["mlp"])
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    with gramian.per_sample_norms(model) as norms:
        F.cross_entropy(torch.func.functional_call(model, others, (x,)), y).backward()
    assert all(p.grad is None for p in model.parameters())
    doubled = CASES["mlp"].make(torch.float64)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(2)
    assert_norms(norms.values, loop_norms(doubled, loss, (x, y)))


def test_a_hook_of_the_user_that_changes_a_gradient_is_no_false_alarm_of_the_audit() -> None:
    model, batch, loss = problem(CASES["mlp"])
    model[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    norms = captured(model, loss, batch)
    assert model[0].weight.grad.abs().max() <= 1e-3
    assert_norms(norms.values, loop_norms(CASES["mlp"].make(torch.float64), loss, batch))


def test_a_hook_that_steps_the_optimizer_during_the_backward_is_left_to_work() -> None:
    model, batch, loss = problem(CASES["mlp"])
    expected = loop_norms(model, loss, batch)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    norms = captured(model, loss, batch)
    assert_norms(norms.values, expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["first layer", "last layer"])
def test_layers_frozen_or_thawed_between_captures_are_noticed(where: str) -> None:
    model, batch, loss = problem(CASES["mlp"])
    layer = model[0] if where == "first layer" else model[4]
    for trained in (True, False, True):
        layer.requires_grad_(trained)
        norms = captured(model, loss, batch)
        name = "0.weight" if where == "first layer" else "4.weight"
        assert norms.coverage[name].status == ("covered" if trained else "frozen")
        assert_norms(norms.values, loop_norms(model, loss, batch))


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(CASES, 0))
def test_withheld_weight_gradients_are_not_formed_and_the_norms_are_right(name: str) -> None:
    case = CASES[name]
    model, batch, loss = problem(case)
    inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in batch[:-1]]
    with hub_of(model).governed_by(Withheld()), gramian.per_sample_norms(model) as norms:
        loss(model, *inputs, batch[-1], reduction="mean").backward()
    assert all(p.grad is None for p in model.parameters())
    assert_norms(norms.values, loop_norms(model, loss, batch), 1e-6 if case.computes_in_float32 else 1e-9)
    untouched = [t.clone().requires_grad_() if t.is_floating_point() else t for t in batch[:-1]]
    loss(case.make(torch.float64), *untouched, batch[-1], reduction="mean").backward()
    for x, y in zip(inputs, untouched, strict=True):
        assert x.grad is y.grad is None or torch.allclose(x.grad, y.grad, rtol=1e-12, atol=1e-15)


def test_withheld_gradients_of_a_model_whose_inputs_need_none_still_reach_the_statistics() -> None:
    model = nn.Linear(5, 4).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    with hub_of(model).governed_by(Withheld()), gramian.per_sample_norms(model) as norms:
        wave(model, x).backward()
    assert model.weight.grad is None
    assert_norms(norms.values, loop_norms(model, wave, (x,)))


def test_after_a_rule_is_lifted_gradients_are_formed_again() -> None:
    model, batch, loss = problem(CASES["mlp"])
    with pytest.raises(ValueError, match="user"), hub_of(model).governed_by(Withheld()):
        raise ValueError("user")
    captured(model, loss, batch)
    assert all(p.grad is not None for p in model.parameters())
