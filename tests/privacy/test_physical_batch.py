"""`max_physical_batch` as "auto" or as bytes: the bytes of a backward by hand, the same result, and refusals."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.privacy.sampling import physical_batch
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import seeded_engine

SAMPLE, STEP = 2 * (6 + 8) * 4 + 3 * 3 * 4, 2 * (6 * 8 + 8 + 8 * 3 + 3) * 4
"""Bytes by hand of 6-8-3: input and tanh, once more for clipping, three times the outputs; gradients, and sums of pieces."""


def run(size: Any, draws: int = 2, **options: Any) -> tuple[gramian.PrivacyEngine, nn.Module, list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(torch.randn(60, 6), torch.randint(3, (60,))), batch_size=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, batches = seeded_engine(), []
    given = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "loss_reduction": "sum",
        "max_physical_batch": size,
        **options,
    }
    _, _, private = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)
    while engine.steps < draws:
        for x, y in private:
            batches.append(len(x))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            if engine.steps == draws:
                break
    return engine, model, batches


@pytest.mark.oracle
@pytest.mark.parametrize("fitting, size", [(1, 1), (5, 4), (8, 8), (15, 8)])
def test_as_many_samples_fit_as_their_bytes_by_hand_and_the_release_is_the_same(fitting: int, size: int) -> None:
    _, whole, _ = run(None)
    engine, split, batches = run(str(STEP + fitting * SAMPLE + SAMPLE - 1))
    assert engine.max_physical_batch == size and max(batches) == size and sum(batches) > size
    assert size == 1 or f"backwards of at most {size} samples" in str(engine.plan)
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_auto_takes_what_is_free_and_a_memory_budget_counts_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("auto")[0].max_physical_batch == 32  # the 60 records bound it
    monkeypatch.setattr(physical_batch, "available_memory", lambda: int((STEP + 5 * SAMPLE) / 0.9) + 1)
    assert run("auto")[0].max_physical_batch == 4
    of_step = STEP + 1000 + 5 * (SAMPLE - (6 + 8) * 4)
    assert run(str(of_step), memory_budget=1000, draws=0)[0].max_physical_batch == 4


def test_a_sample_that_does_not_fit_and_what_cannot_be_measured_are_refused() -> None:
    with refusal(
        "max_physical_batch: '763' finds no room for one sample: its backward needs 148 bytes.*expected more memory"
    ):
        run(str(STEP + SAMPLE - 49))
    with refusal("max_physical_batch: expected bytes"):
        run("big")
    with refusal("max_physical_batch: 'auto' splits Poisson draws; expected a number or None"):
        run("auto", poisson_sampling=False)
    model, loader = nn.Bilinear(2, 2, 2), DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    with refusal(re.escape("max_physical_batch: the model cannot be measured on single records: TypeError")):
        gramian.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, noise_multiplier=1.0,
            max_grad_norm=1.0, max_physical_batch="auto",
        )  # fmt: skip
    assert all(p.grad is None for p in model.parameters()) and not model._forward_pre_hooks
