"""States of `gramian.optim.KFAC` in `torch.distributed.checkpoint`: names of parameters, flattened, from a folder."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import gramian
from tests.kit.refusals import refused
from tests.optim.test_kfac_optimizer import batch_of, model_of, same, stepped

FLAT = pytest.mark.parametrize("flat", [False, True])
OPTIONS: dict[str, Any] = {"update_freq": 4, "max_tokens": 8}


def optimizer_of(model: nn.Module) -> gramian.optim.KFAC:
    return gramian.optim.KFAC(model, **OPTIONS)


def after(steps: int) -> tuple[nn.Module, gramian.optim.KFAC]:
    model = model_of("words", torch.float32)
    optimizer = optimizer_of(model)
    for step in range(steps):
        stepped(optimizer, model, batch_of("words", step))
    return model, optimizer


def goes_on(left: tuple[nn.Module, gramian.optim.KFAC], right: tuple[nn.Module, gramian.optim.KFAC]) -> None:
    for step in range(6, 11):
        for model, optimizer in (left, right):
            stepped(optimizer, model, batch_of("words", step))
    same(right[0], left[0])


@FLAT
@pytest.mark.parametrize("begun", [0, 3])
def test_a_state_goes_on_bit_for_bit_in_an_optimizer_that_has_stepped_or_not(begun: int, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = after(6)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other, again = after(begun)
    other.load_state_dict(model.state_dict())
    again.zero_grad()
    set_optimizer_state_dict(other, again, optim_state_dict=saved, options=options)
    goes_on((model, optimizer), (other, again))


@FLAT
def test_a_folder_goes_on_bit_for_bit_in_a_new_optimizer(flat: bool, tmp_path: Path) -> None:
    """Which has tensors of the saved shapes before its first refresh, also if no forward has shown the output layer."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = after(6)
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other = copy.deepcopy(model)
    again = optimizer_of(other)
    target = {"optimizer": get_optimizer_state_dict(other, again, options=options)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, again, optim_state_dict=target["optimizer"], options=options)
    goes_on((model, optimizer), (other, again))


class BothWays(nn.Module):
    """A weight that is no matrix of one layer: it is used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(20, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.mT)


class Assumed(nn.Module):
    """Weights of which a backward shows whether they are matrices; no forward shows the output layer, which is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.up, self.head, self.both = nn.Linear(6, 6), nn.Linear(6, 9), BothWays()
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return self.head(self.both(self.up(self.rnn(self.mix(h, h, h, need_weights=False)[0])[0])))


@pytest.mark.parametrize("way", ["flattened", "folder"])
def test_weights_that_the_first_refresh_decides_on_go_on_bit_for_bit(way: str, tmp_path: Path) -> None:
    """A folder is read by an optimizer that has stepped once: it knows names and sizes."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    torch.manual_seed(0)
    model = Assumed()
    optimizer = optimizer_of(model)
    for step in range(6):
        stepped(optimizer, model, batch_of("words", step))
    assert all(block.A is not None for block in optimizer.kfac.kfac_factors.values())
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.both.weight.exp_avg" in saved and "state.mix.in_proj_weight.momentum_buffer" in saved
    other = Assumed()
    again = optimizer_of(other)
    if way == "folder":
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        stepped(again, other, batch_of("words", 0))
        saved = get_optimizer_state_dict(other, again, options=options)
        dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(model.state_dict())
    again.zero_grad()
    set_optimizer_state_dict(other, again, optim_state_dict=copy.deepcopy(saved), options=options)
    goes_on((model, optimizer), (other, again))


def test_a_state_of_names_alone_changes_no_step() -> None:
    model, optimizer = after(0)
    before = copy.deepcopy(model)
    get_optimizer_state_dict(model, optimizer)
    same(model, before)
    plain = optimizer_of(before)
    for own, each in ((model, optimizer), (before, plain)):
        stepped(each, own, batch_of("words", 0))
    same(model, before)


def test_a_step_without_a_capture_is_refused_unless_it_asks_for_names() -> None:
    model, optimizer = after(0)
    for rate, size in ((0.0, 1.0), (1.0, 0.0)):
        optimizer.param_groups[0]["lr"] = rate
        for p in model.parameters():
            p.grad = torch.full_like(p, size)
        with refused("step: no capture has run yet"):
            optimizer.step()


def test_states_from_before_the_factors_were_bytes_are_loaded() -> None:
    model, optimizer = after(6)
    state = optimizer.state_dict()
    states = {key: {n: v for n, v in each.items() if n != "kfac"} for key, each in state["state"].items()}
    other = copy.deepcopy(model)
    again = optimizer_of(other)
    again.load_state_dict(copy.deepcopy({**state, "state": states, "kfac": optimizer.kfac.state_dict()}))
    goes_on((model, optimizer), (other, again))


def _state(change: dict[str, Any]) -> tuple[gramian.optim.KFAC, dict[str, Any]]:
    _, optimizer = after(1)
    state = optimizer.state_dict()
    state["state"][0] |= change
    return optimizer, state


@pytest.mark.parametrize(
    "change, text",
    [
        ({"kfac": 0}, 'state_dict: has no "kfac"; expected'),
        ({"kfac": torch.ones(90, dtype=torch.uint8)}, 'state_dict: its "kfac" is damaged; expected'),
        ({"step": {}, "exp_avg": {}, "exp_avg_sq": {}}, "state_dict: has no step of 'table.weight'; expected"),
    ],
)
def test_a_damaged_state_is_one_line_and_changes_nothing(change: dict[str, Tensor | int], text: str) -> None:
    optimizer, state = _state(change)
    before = copy.deepcopy(optimizer.kfac.state_dict()["counters"])
    with refused(text):
        optimizer.load_state_dict(state)
    assert optimizer.kfac.state_dict()["counters"] == before
