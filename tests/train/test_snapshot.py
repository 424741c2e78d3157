"""Copies of the state in memory: independent of what goes on, restored bit for bit, in memory that is used again."""

import gc
import math
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.train.state.snapshot import Snapshots
from gramian.train.state.tensor_parts import Extent, Part, copy_parts, full_extent
from tests.kit.matrix import examples

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.uint16, torch.complex64,
)  # fmt: skip


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bytes, also those that are no number, in a tensor of any dtype."""
    size = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (math.prod(shape) * size,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def raw(t: Tensor) -> bytes:
    return bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def state(value: float) -> dict[str, Tensor]:
    return {"model.w": torch.full((3, 2), value), "model.n": torch.tensor(int(value)), "key": torch.zeros(4)}


def addresses(snapshot) -> set[int]:
    return {part.local.data_ptr() for part in snapshot.parts.values()}


def test_going_on_does_not_change_a_snapshot() -> None:
    snapshots, tensors, facts = Snapshots(2), state(1.0), {"skipped": [3], "best": {"loss": 2.5}}
    first = snapshots.take(1, tensors, facts)
    for t in tensors.values():
        t.add_(1)
    facts["skipped"].append(4)
    facts["best"]["loss"] = 0.0
    snapshots.take(2, tensors, facts)
    assert first.facts == {"skipped": [3], "best": {"loss": 2.5}}
    first.facts["skipped"].append(9)
    assert first.facts["skipped"] == [3]
    assert first.parts["model.w"].local.eq(1).all() and first.parts["model.n"].local == 1
    copy_parts(first.parts, tensors)
    assert tensors["model.w"].eq(1).all() and tensors["model.n"] == 1 and tensors["key"].eq(0).all()


@settings(max_examples=examples(60))
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 999)),
        max_size=5,
    )
)
def test_any_tensors_are_restored_bit_for_bit(spec: dict[str, tuple[tuple[int, ...], torch.dtype, int]]) -> None:
    tensors = {name: filled(*parts) for name, parts in spec.items()}
    before = {name: raw(t) for name, t in tensors.items()}
    snapshot = Snapshots(1).take(0, tensors, {})
    for t in tensors.values():
        t.zero_()
    copy_parts(snapshot.parts, tensors)
    assert {name: raw(t) for name, t in tensors.items()} == before


def test_parameters_and_strided_tensors_are_restored_in_place() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    turned = torch.arange(6.0).reshape(3, 2).t()
    tensors = {"weight": weight, "turned": turned}
    snapshot = Snapshots(1).take(0, tensors, {})
    strides, places = turned.stride(), [t.data_ptr() for t in tensors.values()]
    with torch.no_grad():
        weight.zero_()
        turned.zero_()
    copy_parts(snapshot.parts, tensors)
    assert torch.equal(weight, torch.arange(6.0).reshape(2, 3)) and weight.requires_grad and weight.is_leaf
    assert torch.equal(turned, torch.arange(6.0).reshape(3, 2).t()) and turned.stride() == strides
    assert [t.data_ptr() for t in tensors.values()] == places


def test_the_ring_holds_the_newest() -> None:
    snapshots = Snapshots(3)
    assert snapshots.before(10**9) is None
    for step in (0, 20, 40, 60):
        snapshots.take(step, state(step), {"step": step})
    assert snapshots.steps == [20, 40, 60] and len(snapshots) == 3
    assert [snapshots.before(step).step for step in (20, 39, 40, 59, 999)] == [20, 20, 40, 40, 60]
    assert snapshots.before(19) is None
    snapshots.drop_after(40)
    assert snapshots.steps == [20, 40] and snapshots.before(60).step == 40
    snapshots.take(40, state(7), {"step": "again"})
    assert snapshots.steps == [20, 40] and snapshots.before(40).facts == {"step": "again"}


def test_a_step_back_needs_drop_after() -> None:
    snapshots = Snapshots(2)
    snapshots.take(10, state(1), {})
    with pytest.raises(GramianError, match="^step: 9, but .* step 10; expected drop_after"):
        snapshots.take(9, state(1), {})
    snapshots.drop_after(8)
    assert snapshots.take(9, state(1), {}).step == 9


def test_memory_of_dropped_snapshots_is_used_again() -> None:
    snapshots, tensors = Snapshots(2), state(1.0)
    seen = set()
    for step in range(10):
        seen |= addresses(snapshots.take(step, tensors, {}))
    assert len(seen) == 2 * len(tensors)


@pytest.mark.parametrize("hold", ["snapshot", "parts", "one part"])
def test_memory_that_somebody_holds_is_used_again_only_when_they_let_go(hold: str) -> None:
    snapshots, tensors = Snapshots(1), state(1.0)
    snapshot = snapshots.take(0, tensors, {})
    seen = addresses(snapshot)
    part, held = snapshot.parts["model.w"], {"snapshot": snapshot, "parts": snapshot.parts}
    best = [held.get(hold, part)]
    value = part.local  # without a holder of its own
    del snapshot, part, held
    for step in range(1, 5):
        tensors["model.w"].fill_(step + 1)
        seen |= addresses(snapshots.take(step, tensors, {}))
    assert value.eq(1).all() and len(seen) == 2 * len(tensors)
    thread = threading.Thread(target=best.clear)  # as the checkpoint writer would
    thread.start()
    thread.join()
    best = [snapshots.take(5, tensors, {})]
    seen |= addresses(snapshots.take(6, tensors, {})) | addresses(best[0])
    assert len(seen) == 2 * len(tensors)


def test_memory_of_shapes_that_are_gone_is_freed() -> None:
    snapshots = Snapshots(1)
    snapshots.take(0, {"factor": torch.zeros(5, 5)}, {})
    snapshots.take(1, {"factor": torch.zeros(6, 6)}, {})
    snapshots.take(2, {"factor": torch.zeros(6, 6)}, {})
    assert {tensor[1] for state in snapshots._free for tensor in state} <= {torch.Size([6, 6])}


def test_a_snapshot_dies_with_its_last_holder() -> None:
    snapshots = Snapshots(1)
    watched = weakref.ref(snapshots.take(0, state(1), {}))
    snapshots.take(1, state(1), {})
    gc.collect()
    assert watched() is None


def test_only_a_restoration_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "gramian.train.state.tensor_parts.synchronize", lambda tensors: calls.append(len(list(tensors)))
    )
    snapshot = Snapshots(1).take(0, state(1), {})
    assert calls == []
    copy_parts(snapshot.parts, state(2))
    assert calls == [3]


def test_nothing_is_restored_unless_all_of_it_fits() -> None:
    snapshot = Snapshots(1).take(0, state(1.0), {})
    for name, replaced, message in (
        ("model.w", None, "^model.w: is in the saved state, but not here; expected"),
        ("more", torch.ones(1), "^more: is not in the saved state; expected"),
        ("key", torch.ones(5), r"^key: has shape \[4\] in the saved state; expected \[5\]"),
        ("key", torch.ones(4).double(), "^key: has dtype torch.float32 in the saved state; expected torch.float64"),
    ):
        tensors = state(5.0)
        if replaced is None:
            del tensors[name]
        else:
            tensors[name] = replaced
        before = {name: raw(t) for name, t in tensors.items()}
        with pytest.raises(GramianError, match=message):
            copy_parts(snapshot.parts, tensors)
        assert {name: raw(t) for name, t in tensors.items()} == before


def test_facts_are_plain_values() -> None:
    snapshots = Snapshots(1)
    facts = {"pair": (1, 2), "nothing": None, "best": math.inf, "text": "ü\n", "list": [True, {"a": 0.1}], "big": 2**80}
    assert snapshots.take(0, {}, facts).facts == {**facts, "pair": [1, 2]}
    assert math.isnan(snapshots.take(1, {}, {"loss": math.nan}).facts["loss"])
    for value, message in (
        (torch.ones(1), "^facts.best.loss: is a Tensor; expected numbers"),
        ({1: 2}, "^facts.best.loss: has the key 1; expected text keys"),
        ([0, {1, 2}], "^facts.best.loss.1: is a set; expected"),
    ):
        with pytest.raises(GramianError, match=message):
            snapshots.take(2, {}, {"best": {"loss": value}})
    assert snapshots.steps == [1]


def test_neither_tensors_nor_facts_are_in_the_text_of_a_snapshot() -> None:
    snapshot = Snapshots(1).take(3, {"key": torch.full((2,), 77.0)}, {"secret": 77})
    assert repr(snapshot) == "Snapshot(step=3)"


def test_a_part_gives_the_box_that_another_process_needs() -> None:
    full = torch.arange(20).reshape(5, 4)
    part = Part(Extent((5, 4), (1, 0), (3, 4), True), full[1:4])
    assert torch.equal(part.box(Extent((5, 4), (2, 0), (2, 4), True)), full[2:4])
    assert part.box(Extent((5, 4), (3, 0), (2, 4), True)) is None
    assert part.box(Extent((5, 4), (0, 0), (2, 4), True)) is None
    assert part.box(Extent((5, 4), (5, 0), (0, 4), True)).shape == (0, 4)
    assert part.box(full_extent((5, 5))) is None
    assert Part(full_extent(()), torch.tensor(3)).box(full_extent(())) == 3


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_keep_is_a_number_of_at_least_one(keep: object) -> None:
    with pytest.raises(GramianError, match="^keep: .*; expected an integer of at least 1"):
        Snapshots(keep)


@pytest.mark.parametrize("piece", [1, 64, 10**9])
def test_a_copy_is_the_same_in_pieces_of_any_size(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramian.plan.host_memory.PIECE", piece)
    tensors = {
        "matrix": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(7.0),
        "nothing": torch.empty(0, 3),
        "count": torch.tensor([1, 2], dtype=torch.int64),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "double": torch.ones(9, dtype=torch.float64),
    }
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    snapshot = Snapshots(1).take(0, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    copy_parts(snapshot.parts, tensors)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert snapshot.nbytes == sum(tensor.nbytes for tensor in tensors.values())
