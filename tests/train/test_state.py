"""A model and its optimizer, taken apart into tensors and facts and put together again: the next steps are the same bits."""

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.train.state.flat_state import extents, facts_of, load, tensors_of
from tests.kit.matrix import sample

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}
STEPS_BEFORE = (0, 1, 3)
STEPS_THERE = (0, 2)
"""Steps that the optimizer has done, in another model, into which the state is loaded."""


class Net(nn.Module):
    """Tied weights, a norm with buffers of two dtypes, a frozen parameter, and a buffer that no state holds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).tanh()) * self.frozen


def trained(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> list[float]:
    """Losses of steps whose batches depend on the step alone."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def saved(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict]:
    """As a checkpoint holds it."""
    return copied(tensors_of(model, optimizer)), json.loads(json.dumps(facts_of(model, optimizer)))


@pytest.mark.parametrize(
    "kind, before, there", sample(list(itertools.product(OPTIMIZERS, STEPS_BEFORE, STEPS_THERE)), 3 * len(OPTIMIZERS))
)
def test_the_steps_after_a_load_are_those_after_the_save_bit_for_bit(kind: str, before: int, there: int) -> None:
    model = Net(0)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    trained(model, optimizer, before)
    tensors, facts = saved(model, optimizer)
    expected = trained(model, optimizer, 3, first=before)

    other = Net(1)
    optimizer_of_other = OPTIMIZERS[kind](list(other.parameters()))
    trained(other, optimizer_of_other, there, first=100)
    load(other, optimizer_of_other, tensors, facts)
    assert same(tensors_of(other, optimizer_of_other), tensors)
    assert facts_of(other, optimizer_of_other) == facts
    assert trained(other, optimizer_of_other, 3, first=before) == expected
    assert same(tensors_of(other, optimizer_of_other), tensors_of(model, optimizer))
    assert json.loads(json.dumps(facts_of(other, optimizer_of_other))) == json.loads(
        json.dumps(facts_of(model, optimizer))
    )


def test_names_are_the_users_and_each_tensor_is_there_once() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    trained(model, optimizer, 1)
    trainable = ("first.weight", "first.bias", "norm.weight", "norm.bias", "second.bias")
    buffers = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert set(tensors_of(model, optimizer)) == {
        *(f"model.{name}" for name in (*trainable, "frozen", *buffers)),
        *(f"optimizer.{name}.{field}" for name in trainable for field in ("step", "exp_avg", "exp_avg_sq")),
    }
    assert tensors_of(model, optimizer)["model.first.weight"] is model.first.weight


def test_wrappers_leave_no_trace_in_the_names() -> None:
    plain, wrapped = Net(0), Net(1)
    names = set(tensors_of(plain))
    wrapped.first = checkpoint_wrapper(wrapped.first)
    compiled = torch.compile(wrapped, backend="eager")
    assert set(tensors_of(compiled)) == names
    optimizer = OPTIMIZERS["sgd momentum"](list(compiled.parameters()))
    trained(compiled, optimizer, 1)
    tensors, facts = saved(compiled, optimizer)
    optimizer_of_plain = OPTIMIZERS["sgd momentum"](list(plain.parameters()))
    load(plain, optimizer_of_plain, tensors, facts)
    assert same(tensors_of(plain, optimizer_of_plain), tensors)


def test_a_load_writes_in_place() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    trained(model, optimizer, 1)
    tensors, facts = saved(model, optimizer)
    before = {name: t.data_ptr() for name, t in tensors_of(model, optimizer).items()}
    trained(model, optimizer, 1, first=1)
    load(model, optimizer, tensors, facts)
    assert {name: t.data_ptr() for name, t in tensors_of(model, optimizer).items()} == before
    assert model.second.weight is model.first.weight


def test_state_that_the_saved_one_has_not_is_removed() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    tensors, facts = saved(model, optimizer)
    trained(model, optimizer, 2)
    load(model, optimizer, tensors, facts)
    assert not optimizer.state


def test_a_momentum_that_is_none_yet_stays_none() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["sgd momentum"](list(model.parameters()))
    trained(model, optimizer, 1)
    optimizer.state[model.first.bias]["momentum_buffer"] = None
    tensors, facts = saved(model, optimizer)
    assert "optimizer.first.bias.momentum_buffer" not in tensors
    trained(model, optimizer, 1, first=1)
    load(model, optimizer, tensors, facts)
    assert optimizer.state[model.first.bias] == {"momentum_buffer": None}


def test_options_come_back_in_the_form_they_had_but_not_how_the_step_is_computed() -> None:
    model = Net(0)
    groups = [{"params": [model.first.weight], "weight_decay": 0.5}, {"params": [model.first.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.5, 0.75), foreach=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    tensors, facts = saved(model, optimizer)
    assert "foreach" not in facts["groups"][0]["options"]
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias]}]
    other = torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=None)
    lr = other.param_groups[0]["lr"]
    load(model, other, tensors, facts)
    assert other.param_groups[0]["lr"] is lr and lr.item() == 0.25
    assert [group["weight_decay"] for group in other.param_groups] == [0.5, 0.01]
    assert other.param_groups[0]["betas"] == (0.5, 0.75)
    assert other.param_groups[0]["initial_lr"] == 0.25
    assert other.param_groups[0]["foreach"] is None


def test_adams_step_is_a_float32_on_the_host_and_moments_have_the_saved_dtype() -> None:
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].float()
    tensors, facts = saved(model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    load(model, other, tensors, facts)
    assert other.state[model.weight]["step"].dtype == torch.float32
    assert other.state[model.weight]["exp_avg"].dtype == torch.float32
    assert other.state[model.weight]["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_state_is_made_where_the_optimizer_would_make_it(options: dict[str, bool]) -> None:
    class Scaled(nn.Linear):
        def __init__(self, device: str) -> None:
            super().__init__(3, 2, device=device)
            self.scale = nn.Parameter(torch.tensor(1.0, device=device, dtype=torch.bfloat16))

    model = Scaled("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    (model(torch.ones(1, 3)) * model.scale).sum().backward()
    optimizer.step()
    tensors, facts = saved(model, optimizer)
    elsewhere = Scaled("meta")  # a device that is not the host
    other = torch.optim.AdamW(elsewhere.parameters())
    other.param_groups[0].update(options)
    load(elsewhere, other, tensors, facts)
    for p in elsewhere.parameters():
        state = other.state[p]
        assert state["step"].device.type == ("meta" if options else "cpu") and state["step"].dtype == torch.float32
        assert state["exp_avg"].device.type == "meta" and state["exp_avg"].dtype == p.dtype
        assert state["exp_avg"].shape == p.shape and not state["exp_avg"].requires_grad


def test_the_model_alone_can_be_loaded() -> None:
    model, other = Net(0), Net(1)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    trained(model, optimizer, 1)
    load(other, None, tensors_of(model, optimizer))
    assert same(tensors_of(other), tensors_of(model))


def test_names_of_others_are_left_alone() -> None:
    model = Net(0)
    load(model, None, tensors_of(model) | {"kfac.factor": torch.ones(2)})


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.first.bias=", "^model.first.bias: is not in the saved state; expected"),
        ("model.extra=3", "^model.extra: is in the saved state, but not here; expected"),
        ("model.first.bias=3", r"^model.first.bias: has shape \[3\] in the saved state; expected \[4\]"),
        (
            "model.first.bias=half",
            "^model.first.bias: has dtype torch.float16 in the saved state; expected torch.float32",
        ),
        ("optimizer.first.bias.exp_avg=", "^optimizer.first.bias.exp_avg: is not in the saved tensors; expected"),
        ("optimizer.first.bias.extra=4", "^optimizer.first.bias.extra: is in the saved state, but not here; expected"),
        ("optimizer.other.exp_avg=4", "^optimizer.other.exp_avg: is in the saved state, but not here; expected"),
        ("optimizer.second.bias.exp_avg=3", r"^optimizer.second.bias.exp_avg: has shape \[3\] .*; expected \[4\]"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(change: str, message: str) -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    trained(model, optimizer, 1)
    tensors, facts = saved(model, optimizer)
    trained(model, optimizer, 1, first=1)
    before = saved(model, optimizer)
    name, _, value = change.partition("=")
    if not value:
        del tensors[name]
    else:
        tensors[name] = torch.ones(4).half() if value == "half" else torch.ones(int(value))
    facts["groups"][0]["options"]["lr"] = 7.0
    with pytest.raises(GramianError, match=message):
        load(model, optimizer, tensors, facts)
    after = saved(model, optimizer)
    assert same(after[0], before[0]) and after[1] == before[1]


def test_other_parameter_groups_are_refused() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    tensors, facts = saved(model, optimizer)
    fewer = OPTIMIZERS["adamw"]([model.first.weight])
    with pytest.raises(GramianError, match="^optimizer: group 0 differs from the saved one in .*; expected the same"):
        load(model, fewer, tensors, facts)
    split = torch.optim.AdamW([{"params": [model.first.weight]}, {"params": [model.first.bias]}])
    with pytest.raises(GramianError, match="^optimizer: the saved one has 1 parameter groups; expected 2"):
        load(model, split, tensors, facts)
    for broken in (None, {}, {"groups": 3, "state": {}}, {"groups": [{}], "state": {}}):
        with pytest.raises(GramianError, match="^facts: .*; expected what facts_of gave"):
            load(model, optimizer, tensors, broken)


def test_what_a_state_cannot_hold_is_refused() -> None:
    model = Net(0)
    stranger = OPTIMIZERS["sgd"]([nn.Parameter(torch.ones(3))])
    with pytest.raises(
        GramianError, match=r"^optimizer: group 0 holds a parameter of shape \[3\].*; expected the model's"
    ):
        tensors_of(model, stranger)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    optimizer.state["calls"] = {"count": 1}
    with pytest.raises(GramianError, match="^optimizer: keeps state under 'calls'; expected parameters"):
        tensors_of(model, optimizer)

    class WithExtra(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    with pytest.raises(GramianError, match="^model: 1 keeps extra state; expected"):
        tensors_of(nn.Sequential(nn.Linear(2, 2), WithExtra(2, 2)))


def test_a_plain_model_needs_all_of_every_tensor() -> None:
    model = Net(0)
    optimizer = OPTIMIZERS["adafactor"](list(model.parameters()))
    trained(model, optimizer, 1)
    shapes = {name: tuple(t.shape) for name, t in tensors_of(model, optimizer).items()}
    needed = extents(model, shapes | {"kfac.factor": (2, 2)})
    assert all(not extent.sharded and extent.sizes == shapes[name] for name, extent in needed.items())
    assert "optimizer.first.weight.row_var" not in needed and "optimizer.first.bias.variance" in needed
