"""Snapshots beside the work: a copy is of the moment it was asked for, and nobody waits for it."""

import pytest
import torch

from gramian.train.state.snapshot import Snapshots
from gramian.train.state.tensor_parts import copy_parts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("share", [0.25, 0.0], ids=["staged on the device", "straight to the host"])
def test_a_copy_is_of_its_moment_whatever_is_queued_after_it(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramian.train.state.snapshot.STAGED_SHARE", share)
    device = torch.device("cuda", 0)
    tensors = {f"w{i}": torch.full((2**24,), float(i), device=device) for i in range(8)}
    tensors["buffer"] = torch.zeros(2**22, device=device)
    steady = {name for name in tensors if name != "buffer"}
    snapshots = Snapshots(2)
    for step in range(6):
        expected = {name: t.clone() for name, t in tensors.items()}
        torch.cuda.synchronize()
        snapshot = snapshots.take(step, tensors, {"step": step}, steady)
        tensors["buffer"].add_(1)  # not steady: copied before
        torch.cuda._sleep(10_000_000)
        snapshots.settle()
        for name in steady:
            tensors[name].mul_(-1.5).add_(step)
        for name, part in snapshot.parts.items():
            assert torch.equal(part.local, expected[name].cpu()), name
    restored = {name: torch.empty_like(t) for name, t in tensors.items()}
    copy_parts(snapshot.parts, restored)
    assert all(torch.equal(restored[name], expected[name]) for name in tensors)


def test_steady_tensors_that_are_not_settled_are_copied_while_work_goes_on() -> None:
    """The host comes back before the copy is done: 1 GiB takes some 20 ms."""
    device = torch.device("cuda", 0)
    tensors = {"w": torch.ones(2**28, device=device)}
    snapshots = Snapshots(1)
    snapshots.take(0, tensors, {}, {"w"})
    torch.cuda.synchronize()
    snapshot = snapshots.take(1, tensors, {}, {"w"})
    assert not all(arrival.query() for arrival in snapshot.arrivals)
    assert bool((snapshot.parts["w"].local == 1).all())
