"""What a model remembers in Python: a proof leaves no trace of it, and under privacy no batch depends on samples in it."""

import copy
import enum
import functools
import types
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.core.errors import GramianError
from gramian.privacy import private_model
from gramian.privacy.audit.single_sample_checks import carries_no_state
from gramian.taps.hub import hub_of
from gramian.taps.model.python_state import PythonState, _places
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy

CALLS = 0
LOG: list[int] = []


class Remembering(nn.Module):
    """A layer, and a forward that writes into attributes as the test says."""

    def __init__(self, write: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 3), write

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        found = self.write(self, h)
        return h if found is None else found


def norms(model: nn.Module, x: Tensor) -> Tensor:
    with gramian.per_sample_norms(model, "sum") as found:
        model(x).square().sum().backward()
    return found.values


@dataclass
class Settings:
    steps: int = 0


def count_everywhere(model: Any, h: Tensor) -> None:
    model.nested["a"][0]["n"] += 1
    model.tuple[0].append(1)
    model.array += 1
    model.tensor.add_(1)
    model.replaced = model.replaced + 1
    model.names.steps += 1
    model.settings.steps += 1
    model.counter.update("x")
    model.queue.append(0)
    model.new = getattr(model, "new", 0) + 1


def test_no_proof_leaves_a_trace_in_attributes_of_any_kind() -> None:
    def make() -> Any:
        model: Any = Remembering(count_everywhere)
        model.nested, model.tuple = {"a": [{"n": 0}]}, ([],)
        model.array, model.tensor, model.replaced = np.zeros(2), torch.zeros(2), torch.zeros(())
        model.names, model.settings = types.SimpleNamespace(steps=0), Settings()
        model.counter, model.queue = Counter(), deque()
        return model

    def state(model: Any) -> list[Any]:
        tensors = [model.array.tolist(), model.tensor.tolist(), float(model.replaced)]
        counts = [model.names.steps, model.settings, dict(model.counter), list(model.queue), model.new]
        return [model.nested, model.tuple, *tensors, *counts]

    model, plain, x = make(), make(), torch.randn(6, 4)
    plain(x)
    norms(model, x)
    assert state(model) == state(plain)


def count_globally(kind: str, *_: Any) -> None:
    global CALLS
    CALLS += 1
    LOG.append(0)


def test_no_proof_leaves_a_trace_in_what_hooks_count_in() -> None:
    counts, seen = {"n": 0}, list[int]()

    def count(where: dict[str, int], *_: Any, also: list[int]) -> None:
        where["n"] += 1
        also.append(0)

    model, before = Remembering(lambda model, h: None), (CALLS, len(LOG))
    model.layer.register_forward_hook(functools.partial(count, counts, also=seen))
    model.layer.register_forward_hook(functools.partial(count_globally, "layer"))
    everywhere = torch_module.register_module_forward_hook(functools.partial(count, counts, also=seen))
    try:
        norms(model, torch.randn(6, 4))
    finally:
        everywhere.remove()
    assert counts["n"] == len(seen) == 3  # of the layer twice, of the root once
    assert (CALLS, len(LOG)) == (before[0] + 1, before[1] + 1)


def test_every_run_begins_with_what_the_first_began_with() -> None:
    def schedule(model: Any, h: Tensor) -> Tensor:
        model.step += 1
        return h * model.step

    model: Any = Remembering(schedule).double()
    model.step = 0
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(row.square().sum(), list(model.parameters()))]).norm()
            for row in (torch.tanh(model.layer(one)) for one in x)
        ]
    )
    torch.testing.assert_close(norms(model, x), expected)
    assert model.step == 1


def test_values_lists_what_changed_and_restore_puts_it_back() -> None:
    model: Any = Remembering(lambda model, h: None)
    model.kept, model.changed, model.number = torch.zeros(3), torch.zeros(3), 1.5
    state = PythonState(model)
    model.changed[0], model.number, model.added = 1, 2.5, torch.ones(())
    assert state.values().keys() == {"changed", "number", "added"}
    state.restore()
    assert not state.values() and not model.changed.any() and model.number == 1.5 and not hasattr(model, "added")


# ---- under privacy -----------------------------------------------------------------------------------------------------


def private(model: nn.Module, x: Tensor, **options: Any) -> gramian.PrivacyEngine:
    engine = gramian.PrivacyEngine()
    attach(engine, model, DataLoader(TensorDataset(x), batch_size=len(x)), **options)
    return engine


def centred_by_earlier_batches() -> Any:
    def centred(model: Any, h: Tensor) -> Tensor:
        found = h - model.mean
        model.mean = 0.9 * model.mean + 0.1 * h.detach().mean(0)
        return found

    model: Any = Remembering(centred)
    model.mean = torch.zeros(3)
    return model


def test_statistics_in_a_plain_attribute_are_refused_under_privacy() -> None:
    model, x = centred_by_earlier_batches(), torch.randn(6, 4)
    engine = private(model, x)
    with refusal(r"^mean: is an attribute that remembers samples.*; expected"):
        model(x)
    engine.detach()
    assert not model.mean.any()


def test_a_record_that_nothing_reads_stays_welcome_under_privacy() -> None:
    def logged(model: Any, h: Tensor) -> Tensor:
        model.last, model.step = h.detach().mean(), model.step + 1
        return h * model.step

    model: Any = Remembering(logged)
    model.last, model.step = None, 0
    x = torch.randn(6, 4)
    engine = private(model, x)
    model(x).square().sum().backward()
    engine.detach()
    assert model.step == 1


# ---- losses in attributes ----------------------------------------------------------------------------------------------


def balance(model: Any, h: Tensor) -> None:
    model.aux = h.mean(0).square().sum()


def test_a_loss_in_an_attribute_that_couples_samples_is_refused_if_a_backward_goes_through_it() -> None:
    model: Any = Remembering(balance)
    x = torch.randn(6, 4)
    for _ in range(2):
        with gramian.per_sample_norms(model):
            model(x).square().sum(1).mean().backward()
        with refusal(r"^attribute aux of the model couples samples"), gramian.per_sample_norms(model):
            (model(x).square().sum(1).mean() + model.aux).backward()


def test_losses_that_are_appended_to_a_list_are_watched_too() -> None:
    model: Any = Remembering(lambda model, h: model.losses.append(h.mean(0).square().sum()))
    model.losses, x = [], torch.randn(6, 4)
    for _ in range(3):
        with refusal(r"^attribute losses\.\d of the model couples samples"), gramian.per_sample_norms(model):
            (model(x).square().sum(1).mean() + model.losses[-1]).backward()
    assert len(model.losses) == 3


def test_a_loss_in_an_attribute_that_keeps_samples_apart_is_exact() -> None:
    def penalised(model: Any, h: Tensor) -> Tensor:
        model.aux = h.square().sum(1).mean()
        return torch.cat([h, h.square().sum(1, keepdim=True)], 1)

    torch.manual_seed(0)
    model: Any = Remembering(penalised).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    with gramian.per_sample_norms(model) as found:
        (model(x)[:, :3].sin().sum(1).mean() + model.aux).backward()
    for i, value in enumerate(found.values):
        loss = model(x[i : i + 1])[:, :3].sin().sum() + model.aux
        own = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


# ---- states in attributes ------------------------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """Begins where its attribute says, and leaves its last state there, in the graph of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.state = nn.Parameter(torch.linspace(-1, 1, 4)), None

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for x_BD in x.unbind(1):
            before = torch.zeros_like(x_BD) if self.state is None else self.state
            self.state = before * self.decay.sigmoid() + x_BD
            rows.append(self.state)
        return torch.stack(rows, 1)


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(4, 4), Recurrence()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = None
        return self.cell(self.enter(x))


def test_a_layer_runs_again_from_the_state_it_began_with() -> None:
    """With another state it would fail, or compute with that of all samples."""
    torch.manual_seed(0)
    model, x = Scan().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    with gramian.per_sample_norms(model, "sum") as found:
        model(x).sin().sum().backward()
    assert model.cell.state.shape == (3, 4)
    model.cell.state.detach_()
    for i, value in enumerate(found.values):
        own = torch.autograd.grad(model(x[i : i + 1]).sin().sum(), list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


def test_a_loss_of_a_state_that_no_tap_sees_is_refused() -> None:
    model, x = Scan(), torch.randn(3, 5, 4)
    with refusal(r"^attribute cell.state of the model couples samples"), gramian.per_sample_norms(model, "sum"):
        (model(x).sin().sum() + model.cell.state.sum()).backward()


# ---- what is exchanged between captures ----------------------------------------------------------------------------------


def test_a_module_or_a_hook_that_is_exchanged_between_captures_is_proven_anew() -> None:
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    norms(model, x)
    model[1] = Toy(lambda net, h: h - h.mean(0))
    with refusal("changes when other samples are replaced"):
        norms(model, x)
    model[1] = nn.Tanh()
    norms(model, x)
    handle = model[1].register_forward_hook(lambda module, args, output: output - output.mean(0))
    with refusal("changes when other samples are replaced"):
        norms(model, x)
    handle.remove()
    count = len(hub_of(model).proof.proven)
    norms(model, x)
    assert len(hub_of(model).proof.proven) == count


def test_a_batch_without_gradients_covers_no_other() -> None:
    def scaled(net: Any, x: Tensor, scale: Tensor) -> Tensor:
        h = net.layer(x) * scale
        return h - h.mean(0)

    model, x = Toy(scaled, layer=nn.Linear(4, 3, bias=False)), torch.randn(6, 4)
    for _ in range(4):
        with gramian.per_sample_norms(model) as found:
            model(x, torch.zeros(3)).sin().sum().backward()
        assert not found.values.any()
    with refusal("changes when"), gramian.per_sample_norms(model):
        model(x, torch.ones(3)).sin().sum().backward()


def test_an_output_in_slots_is_an_output() -> None:
    @dataclass(slots=True)
    class Output:
        logits: Tensor

    class Slotted(nn.Module):
        def __init__(self, couples: bool) -> None:
            super().__init__()
            self.layer, self.couples = nn.Linear(4, 3), couples

        def forward(self, x: Tensor) -> Output:
            h = self.layer(x)
            return Output(h - h.mean(0) if self.couples else h)

    x = torch.randn(6, 4)
    for couples in (False, True):
        model = Slotted(couples)
        try:
            with gramian.per_sample_norms(model):
                model(x).logits.sin().sum(1).mean().backward()
        except GramianError as error:
            assert couples and "changes when other samples are replaced" in str(error)
        else:
            assert not couples


# ---- arguments and outputs -----------------------------------------------------------------------------------------------


def given_net(forward: Callable[..., Any]) -> Toy:
    """A layer and a head, and a forward that the test gives."""
    return Toy(lambda net, *args: net.inner(net, *args), layer=nn.Linear(4, 5), head=nn.Linear(5, 3), inner=forward)


def test_a_generator_that_is_an_argument_draws_the_same_in_every_run() -> None:
    def noisy(self: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.head(h + torch.rand(h.shape, generator=generator))

    generator, x = torch.Generator().manual_seed(1), torch.randn(6, 4)
    model = given_net(noisy)
    with gramian.per_sample_norms(model):
        model(x, generator).sin().sum(1).mean().backward()
    expected = torch.Generator().manual_seed(1)
    torch.rand(6, 5, generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_an_input_with_several_rows_of_each_sample_moves_with_them() -> None:
    def paired(self: Any, x: Tensor, views: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x) + self.layer(views).view(len(x), 2, -1).sum(1)))

    torch.manual_seed(0)
    model = given_net(paired).double()
    assert_exact_by_rows(model, torch.randn(5, 4).double(), torch.randn(10, 4).double(), rows=2)


def assert_exact_by_rows(model: nn.Module, x: Tensor, other: Tensor, rows: int) -> None:
    with gramian.per_sample_norms(model) as found:
        model(x, other).sin().sum(1).mean().backward()
    for i, value in enumerate(found.values):
        loss = model(x[i : i + 1], other[rows * i : rows * (i + 1)]).sin().sum()
        own = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


def test_lists_of_lists_and_of_tensors_are_samples() -> None:
    def of_lists(self: Any, x: Tensor, numbers: list[list[float]]) -> Tensor:
        return self.head(torch.tanh(self.layer(x)) * torch.tensor(numbers).to(x).sum(1, keepdim=True))

    def of_tensors(self: Any, several: list[Tensor]) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.stack([t.mean(0) for t in several]))))

    torch.manual_seed(0)
    model, x = given_net(of_lists).double(), torch.randn(4, 4).double()
    numbers = [[1.0, 2.0], [3.0, 1.0], [0.5, 0.5], [2.0, 2.0]]
    with gramian.per_sample_norms(model) as found:
        model(x, numbers).sin().sum(1).mean().backward()
    for i, value in enumerate(found.values):
        own = torch.autograd.grad(model(x[i : i + 1], numbers[i : i + 1]).sin().sum(), list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())
    model, several = given_net(of_tensors).double(), [torch.randn(n, 4).double() for n in (3, 1, 2, 5)]
    with gramian.per_sample_norms(model, batch_size=4) as found:
        model(several).sin().sum(1).mean().backward()
    for value, one in zip(found.values, several, strict=True):
        own = torch.autograd.grad(model([one]).sin().sum(), list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


@pytest.mark.parametrize("tokens", [3, 5, 10])
def test_a_first_output_may_have_its_samples_on_the_second_axis(tokens: int) -> None:
    def time_first(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x))).transpose(0, 1)

    torch.manual_seed(0)
    model, x = given_net(time_first).double(), torch.randn(5, tokens, 4).double()
    with gramian.per_sample_norms(model) as found:
        model(x).sin().sum((0, 2)).mean().backward()
    for i, value in enumerate(found.values):
        own = torch.autograd.grad(model(x[i : i + 1]).sin().sum(), list(model.parameters()))
        torch.testing.assert_close(value, torch.cat([g.flatten() for g in own]).norm())


def test_rows_in_an_attribute_that_couple_are_no_reason_to_refuse_a_loss_of_the_outputs() -> None:
    model: Any = Remembering(lambda model, h: setattr(model, "centred", h - h.mean(0)))
    x = torch.randn(6, 4)
    assert len(norms(model, x)) == 6
    with refusal(r"^attribute centred of the model"), gramian.per_sample_norms(model):
        (model(x).sum() + model.centred.square().sum()).backward()


def test_a_forward_that_runs_again_counts_once() -> None:
    def branching(net: Any, x: Tensor) -> Tensor:
        net.count += 1
        net.calls += 1
        h = torch.tanh(net.layer(x))
        return h + net.shared(torch.ones(1, 2)) if bool(x[0, 0] > 0) else h

    model = Toy(branching, layer=nn.Linear(4, 3), shared=nn.Linear(2, 3), calls=0, count=nn.Buffer(torch.zeros(())))
    x = torch.randn(6, 4)
    x[:, 0] = -x[:, 0].abs()
    for batch in (x, x.abs(), x):
        norms(model, batch)
    assert (float(model.count), model.calls) == (3.0, 3)


class Queue(OrderedDict[int, int]):
    """A container of the user's own, whose items and attributes belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.hits = 0

    def __getitem__(self, key: int) -> int:
        return super().__getitem__(key) if key in self else -1

    def count(self, key: int) -> None:
        self[key] = self[key] + 1
        self.order.append(key)
        self.hits += 1


@dataclass(slots=True)
class Slots:
    count: int = 0


def test_a_container_of_the_users_own_keeps_its_items_and_attributes() -> None:
    def count(model: Any, h: Tensor) -> None:
        model.queue.count(len(h))
        model.wrapped["n"] = model.wrapped.get("n", 0) + 1
        model.slots.count += 1

    model: Any = Remembering(count)
    model.queue, model.wrapped, model.slots = Queue(), UserDict[str, int](), Slots()
    norms(model, torch.randn(6, 4))
    assert (dict(model.queue), model.queue.order, model.queue.hits) == ({6: 0}, [6], 1)
    assert dict(model.wrapped) == {"n": 1} and model.slots.count == 1


def test_a_large_container_is_not_copied_and_what_is_appended_to_it_is_put_back() -> None:
    def count(model: Any, h: Tensor) -> None:
        model.history.append(len(h))

    model: Any = Remembering(count)
    model.history, model.vocabulary = [0] * 5000, {str(n): [n] for n in range(5000)}
    norms(model, torch.randn(6, 4))
    assert len(model.history) == 5001
    assert len(list(_places(model))) < 10


class Scaled(nn.Module):
    """A parameter of its own, so that it runs again by samples; keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last, self.history = nn.Parameter(torch.ones(4)), torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.last = (x * self.scale).detach()
        self.history[:] = [self.last]
        return x * self.scale


def test_a_layer_that_runs_again_by_samples_keeps_the_attributes_of_the_users_forward() -> None:
    model, x = Scaled(), torch.randn(6, 4)
    norms(model, x)
    torch.testing.assert_close(model.last, x, rtol=0, atol=0)
    torch.testing.assert_close(model.history[0], x, rtol=0, atol=0)


class Mixing(nn.Module):
    """Couples samples once a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h - h.mean(0) if self.mix else h


def test_a_flag_that_is_set_after_the_proof_is_proven_anew() -> None:
    model, x = Mixing(), torch.randn(6, 4)
    norms(model, x)
    model.mix = True
    with refusal("when other samples are replaced"):
        norms(model, x)


class Turning(nn.Module):
    """Has its samples on the axis that an attribute says; T is B, so that no shape shows which one it is."""

    axis: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        turns = (
            self.axis in (1, 1.0, "turned", (1, 0), [1, 0], {"axis": 1}, Turns.YES)
            or getattr(self.axis, "turned", 0) == 1
        )
        return torch.tanh(self.layer(x.transpose(0, int(turns)))).transpose(0, int(turns))


class Turns(enum.Enum):
    NO, YES = 0, 1


class Slotted:
    __slots__ = "turned"

    def __init__(self, turned: int) -> None:
        self.turned = turned


TURNS: dict[str, tuple[Any, Any]] = {
    "number": (0, 1),
    "float": (0.0, 1.0),
    "word": ("", "turned"),
    "tuple": ((0, 1), (1, 0)),
    "enumeration": (Turns.NO, Turns.YES),
    "object": (types.SimpleNamespace(turned=0), types.SimpleNamespace(turned=1)),
    "dict": ({"axis": 0}, {"axis": 1}),
    "slots": (Slotted(0), Slotted(1)),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", TURNS)
def test_an_attribute_that_turns_a_model_of_as_many_tokens_as_samples_is_proven_anew(kind: str, first: int) -> None:
    model, x = Turning().double(), torch.randn(5, 5, 4, dtype=torch.float64)
    alone = torch.stack([norms(copy.deepcopy(model), row[None])[0] for row in x])
    for value in (TURNS[kind][first], TURNS[kind][1 - first], TURNS[kind][first]):
        model.axis = value
        torch.testing.assert_close(norms(model, x), alone, rtol=1e-12, atol=0)
    assert len(hub_of(model).proof.proven) == 2


def test_a_list_that_is_changed_in_place_is_proven_anew() -> None:
    model, x = Turning().double(), torch.randn(5, 5, 4, dtype=torch.float64)
    model.axis = [0, 1]
    before = norms(model, x)
    model.axis.reverse()
    torch.testing.assert_close(norms(model, x), before, rtol=1e-12, atol=0)


def test_counters_rates_and_growing_lists_are_soon_one_structure() -> None:
    def remember(model: Any, h: Tensor) -> None:
        model.count, model.rate = model.count + 1, model.rate * 0.9
        model.log.append(0.5)

    model: Any = Remembering(remember)
    model.count, model.rate, model.log = 0, 1.0, []
    for _ in range(12):
        norms(model, torch.randn(6, 4))
    proven = len(hub_of(model).proof.proven)
    for _ in range(12):
        norms(model, torch.randn(6, 4))
    assert len(hub_of(model).proof.proven) == proven == 10


class Student(nn.Module):
    """Moves a teacher's weights in its forward."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.layer, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.by_data:  # moves no version
                self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * self.layer.weight.data
            else:
                self.teacher.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) - self.teacher(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_forward_that_writes_into_a_frozen_parameter_is_refused_by_name(by_data: bool) -> None:
    with refusal(r"^teacher\.weight: is a frozen parameter that the forward writes into"):
        norms(Student(by_data), torch.randn(6, 4))


def tempered() -> Toy:
    """Its first argument is a temperature, not samples."""
    return Toy(lambda net, temperature, x: net.layer(x) / temperature, layer=nn.Linear(4, 3))


def masked() -> Toy:
    """Its second argument is no sample's."""
    return Toy(lambda net, x, mask: net.layer(x) @ mask, layer=nn.Linear(4, 3))


@pytest.mark.parametrize("shape", [(1,), (1, 3)])
@pytest.mark.parametrize("physical", [None, 1])
def test_a_number_or_a_prompt_as_first_tensor_makes_no_private_batch_of_one(
    physical: int | None, shape: tuple[int, ...]
) -> None:
    model, x = tempered(), torch.randn(2, 4)
    private(model, x, max_physical_batch=physical)
    with refusal("first tensor has one row"):
        model(torch.ones(shape), x)


class Largest(nn.Module):
    """Divides by the largest value that it has seen, in a buffer or an attribute, or only counts samples."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where, self.seen = nn.Linear(4, 3), where, torch.ones(())
        self.register_buffer("top", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x / (self.top if self.where == "buffer" else self.seen))
        if self.where == "buffer":
            self.top.copy_(torch.maximum(self.top, x.detach().abs().max()))
        elif self.where == "attribute":
            self.seen = torch.maximum(self.seen, x.detach().abs().max())
        else:
            self.top += 1
        return h


@pytest.mark.parametrize("physical", [None, 1])
@pytest.mark.parametrize("where, name", [("buffer", "^top: is a buffer"), ("attribute", "^seen: is an attribute")])
def test_memory_of_samples_that_come_one_at_a_time_is_refused(where: str, name: str, physical: int | None) -> None:
    model, x = Largest(where), 5 + torch.randn(1, 4)
    private(model, x, max_physical_batch=physical)
    with refusal(name):
        model(x)


@pytest.mark.parametrize("physical", [None, 1])
def test_a_counter_of_samples_that_come_one_at_a_time_is_welcome(physical: int | None) -> None:
    model, x = Largest("counter"), torch.randn(1, 4)
    private(model, x, max_physical_batch=physical)
    for _ in range(2):
        model(x).square().sum().backward()
    assert model.top == 3


class Strict(nn.Module):
    """Takes nothing but samples of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.min() >= 0 and x.max() <= 1 and len(x.unique()) == 4, "not a sample of mine"
        return self.layer(x)


@pytest.mark.parametrize("physical", [None, 1])
def test_a_model_that_refuses_what_is_made_of_a_sample_is_looked_at_once(
    physical: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, looks = Strict(), torch.rand(1, 4), []
    monkeypatch.setattr(private_model, "carries_no_state", lambda *given: looks.append(1) or carries_no_state(*given))
    private(model, x, max_physical_batch=physical)
    for _ in range(3):
        model(x).square().sum().backward()
    assert len(looks) == 1


def test_a_last_batch_of_one_may_have_a_mask_of_more_rows() -> None:
    """Larger batches were proven before it."""
    model, x = masked(), torch.randn(6, 4)
    private(model, x)
    for batch in (x, x[:1]):
        model(batch, torch.ones(3, 3)).square().sum().backward()


# ---- what no proof sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0]])
def test_a_layer_that_runs_beside_the_models_forward_is_refused_by_name(order: list[int]) -> None:
    model, x = Remembering(lambda model, h: None), torch.randn(6, 4)
    with (
        refusal(r"^layer: ran outside a forward of the captured model, where no proof sees"),
        gramian.per_sample_norms(model, "sum"),
    ):
        (model(x).square().sum() + model.layer(x[order]).square().sum()).backward()
    private(model, x)
    with refusal(r"^layer: ran outside a forward of the captured model, where no proof sees"):
        (model(x).square().mean() + model.layer(x[order]).square().mean()).backward()


def test_sums_take_layers_that_run_beside_the_models_forward() -> None:
    model, x, moments = Remembering(lambda model, h: None), torch.randn(6, 4), gramian.Health()
    with gramian.observe(model, moments, loss_reduction="sum"):
        (model(x).square().sum() + model.layer(x.flip(0)).square().sum()).backward()


@dataclass
class Context:
    rows: Tensor


class Informed(nn.Module):
    """Reads a batch from an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        rows = context["rows"] if isinstance(context, UserDict) else context.rows
        return self.layer(x + rows.mean(0))


@pytest.mark.parametrize(
    "kind", [Context, lambda rows: types.SimpleNamespace(rows=rows), lambda rows: UserDict(rows=rows)]
)
def test_an_object_that_holds_a_batch_is_refused(kind: Callable[[Tensor], Any]) -> None:
    model, x = Informed(), torch.randn(6, 4)
    with refusal("with a tensor of shape"), gramian.per_sample_norms(model, "sum"):
        model(x, kind(torch.randn(6, 4)))


def test_statistics_in_an_attribute_are_welcome_where_nothing_is_private() -> None:
    assert norms(centred_by_earlier_batches(), torch.randn(6, 4)).isfinite().all()


def test_a_nested_tensor_is_refused_in_one_line() -> None:
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with refusal("its first tensor is nested; expected a padded tensor"):
        norms(nn.Linear(4, 3), ragged)
