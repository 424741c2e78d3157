"""Accelerate's `prepare` before and after `make_private`: the same private run, on one process and on two."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from tests.kit.processes import run_on_ranks
from tests.kit.refusals import refusal
from tests.privacy.problems import assert_sums, weights

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'gramian[test-integrations]'")
pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]
STEPS = 4


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def parts(batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(32, 5).double(), torch.randint(3, (32,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(data, batch_size=batch_size, shuffle=True)


def private(made: tuple[Any, Any, Any]) -> tuple[gramian.PrivacyEngine, tuple[Any, Any, Any]]:
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=0)
    module, optimizer, loader = made
    return engine, engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=0.5, max_grad_norm=1.0
    )


def accelerated(order: str, batch_size: int = 8, decay: float = 0.9) -> dict[str, Tensor]:
    """The weights after one epoch: "plain" without Accelerate, else prepared before or after `make_private`.

    Accelerate steps a scheduler once for each process.
    """
    from accelerate import Accelerator

    made: tuple[Any, Any, Any] = parts(batch_size)
    inner = made[0]
    accelerator = None if order == "plain" else Accelerator(cpu=True)
    if accelerator is not None and order == "before":
        made = accelerator.prepare(*made)
    engine, made = private(made)
    if accelerator is not None and order == "after":
        made = accelerator.prepare(*made)
    model, optimizer, loader = made
    scheduler = torch.optim.lr_scheduler.ExponentialLR(getattr(optimizer, "optimizer", optimizer), decay)
    if accelerator is not None:
        scheduler = accelerator.prepare(scheduler)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        if accelerator is not None:
            accelerator.clip_grad_norm_(model.parameters(), float("inf"))  # changes no value
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert engine.steps == STEPS
    engine.detach()
    return weights(inner)


@pytest.mark.parametrize("order", ["before", "after"])
def test_prepare_before_or_after_is_the_loop_without(order: str) -> None:
    plain, found = accelerated("plain"), accelerated(order)
    assert all(torch.equal(now, plain[name]) for name, now in found.items())


def accelerated_on_rank(rank: int, world_size: int, order: str) -> dict[str, Tensor]:
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return accelerated(order, 8 // world_size, decay=0.81 ** (1 / 2 / world_size))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def refused_on_rank(rank: int, world_size: int) -> None:
    with refusal("wrapped in DistributedDataParallel after make_private"):
        accelerated_on_rank(rank, world_size, "after")


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_two_processes_prepare_before_and_are_refused_after() -> None:
    first, second = run_on_ranks(2, accelerated_on_rank, "before")
    assert all(torch.equal(first[name], now) for name, now in second.items())
    assert_sums(first, accelerated("plain"), 1e-9)
    run_on_ranks(2, refused_on_rank)


def test_accumulation_of_accelerate_is_refused_by_the_engine() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, made = private(accelerator.prepare(*parts(8)))
    model, optimizer, loader = made
    with refusal("expected one optimizer.step"):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
