"""Factors sent to host memory while work goes on: nobody reads what has not arrived, nothing piles up on the GPU.

No GPU is needed: a lane of these tests copies when somebody waits for it and not before, as the slowest of streams would.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.refresh import build_factors
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank, pinned
from gramian.linalg.factors.offload import Offload
from tests.linalg.matrices import distance, normal, positive, probabilities, stored_matrix


class Event:
    """Passes when it is waited for, and with it all copies made before."""

    def __init__(self, lane: "SlowLane") -> None:
        self.lane, self.copies = lane, list(lane.waiting)

    def synchronize(self) -> None:
        for into, t in self.copies:
            into.copy_(t)
        done = {id(into) for into, _ in self.copies}
        self.lane.waiting = [(into, t) for into, t in self.lane.waiting if id(into) not in done]


class SlowLane(pinned.Lane):
    """What it sends or fetches is NaN until it is waited for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def send(self, t: Tensor) -> Tensor:
        there = torch.full_like(t, float("nan"))
        self.waiting.append((there, t))
        self.most = max(self.most, len(self.waiting))
        return there

    def fetch(self, source: Tensor) -> tuple[Tensor, Any]:
        return self.send(source), self.mark()

    def receive(self, t: Tensor, event: Any) -> Tensor:
        event.synchronize()
        return t

    def mark(self) -> Event:
        return Event(self)

    def work_mark(self) -> Event:
        return Event(self)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> SlowLane:
    found = SlowLane()
    monkeypatch.setattr(pinned, "lane_of", lambda device: found)
    return found


def factors() -> list[Factor]:
    p, w = probabilities(30, 7)
    return [
        Dense.of(positive(12), torch.float16),
        LowRank.of(normal(40, 5), torch.float16),
        DiagonalLowRank.softmax(p * w.sqrt(), torch.float16),
        DiagonalLowRank.of(normal(20).abs(), normal(20, 3), +1),
        Diagonal(normal(9).abs()),
    ]


def test_every_part_of_every_factor_arrives_and_its_trace_is_known_before(lane: SlowLane) -> None:
    offload = Offload()
    for factor in factors():
        moved = offload(factor)
        assert type(moved) is type(factor) and moved.kind == factor.kind
        assert bool(moved.diagonal().isnan().any())  # not there yet
        assert float(moved._pending_trace) == float(factor.trace())
        offload.settle()
        assert torch.equal(stored_matrix(moved), stored_matrix(factor))
        assert torch.equal(moved.quantisation_error, factor.quantisation_error)
        assert moved.nbytes == factor.nbytes
        y = normal(factor.dim, 2, seed=3)
        assert distance(moved.solve(y, 0.3), factor.solve(y, 0.3)) <= 1e-12


def test_one_factor_is_on_its_way_at_a_time(lane: SlowLane) -> None:
    offload, sent = Offload(), [LowRank.of(normal(40, 5), torch.float16) for _ in range(5)]
    moved = [offload(factor) for factor in sent]
    assert lane.most == 3  # body, scales and error of one
    assert not any(bool(factor.diagonal().isnan().any()) for factor in moved[:-1])
    assert bool(moved[-1].diagonal().isnan().any())


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_blocks_come_back_in_order_two_at_a_time(lane: SlowLane, count: int) -> None:
    body, blocks = normal(count, 3), [slice(i, i + 1) for i in range(count)]
    found = [(rows, part.clone()) for rows, part in pinned._ahead(lane, body, blocks)]
    assert [rows for rows, _ in found] == blocks
    assert torch.equal(torch.cat([part for _, part in found]), body)
    assert lane.most <= 2


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_a_refresh_reads_no_factor_before_it_has_arrived(
    lane: SlowLane, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.curvature.small import FEW, kept, net, refresh, words

    def sent(self: build_factors.Placement, factor: Factor) -> Factor:
        return self._offload(factor)

    model, batch = net(tied=tied, dtype=torch.float64), words(FEW)
    options = {"update_freq": 1, "ema_decay": 0.9, "woodbury_dtype": "fp32"}
    expected = kept(refresh(refresh(gramian.KFACNaturalGradient(**options), model, batch), model, batch))
    monkeypatch.setattr(build_factors.Placement, "__call__", sent)
    found = kept(refresh(refresh(gramian.KFACNaturalGradient(**options), model, batch), model, batch))
    assert lane.most > 0
    for name, t in found.items():
        assert distance(t, expected[name]) <= 1e-12, name


def test_without_a_gpu_nothing_is_pinned_and_nothing_waits() -> None:
    model = torch.nn.Linear(8, 4)
    kfac = gramian.KFACNaturalGradient(woodbury_store_device="cpu")
    with kfac.capture(model, num_terms=3):
        model(torch.randn(3, 8)).square().mean().backward()
    factor = next(iter(kfac.kfac_factors.values())).G
    assert factor.device.type == "cpu" and not factor.diagonal().is_pinned()
    assert not pinned._lanes
