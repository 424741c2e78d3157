"""Private runs over the samples of a problem, drawn as Poisson batches, for tests of the engine."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gramian
from tests.privacy.problems import Run, private
from tests.statistics.problems import Problem

RECORDS, EXPECTED = 24, 6
SPLITS = (None, 1, 2, 5)


def seeded_engine(seed: int = 2, accountant: str = "prv") -> gramian.PrivacyEngine:
    return gramian.PrivacyEngine(accountant, insecure_reproducible=True, seed=seed)


def poisson_run(p: Problem, model: nn.Module, limit: float, **options: Any) -> Any:
    """A private run over the problem's samples, each with its number."""
    given = {
        "engine": seeded_engine(),
        "loss_reduction": "sum",
        "poisson_sampling": True,
        "batch_size": EXPECTED,
        **options,
    }
    return private(model, limit, data=(torch.arange(RECORDS), *p.batch), **given)


def drawn_steps(run: Run, p: Problem, count: int) -> Iterator[list[int]]:
    """Train for some draws, whatever pieces they come in; the records of each after its step."""
    drawn: list[int] = []
    before = run.engine.steps
    while True:
        for ids, *batch in run.loader:
            run.optimizer.zero_grad()
            p.case.loss(run.model, *batch, reduction="sum").backward()
            drawn += ids.tolist()
            run.optimizer.step()
            if run.engine.steps > before:
                yield drawn
                drawn, before = [], run.engine.steps
                count -= 1
                if not count:
                    return


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def assert_untouched(model: nn.Module, optimizer: Any) -> None:
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    assert all(not q._backward_hooks for q in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
