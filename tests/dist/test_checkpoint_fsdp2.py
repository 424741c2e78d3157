"""Snapshots and checkpoints of states sharded by FSDP2: written by any number of processes, read by any number, bit for bit."""

import errno
import os
import pickle
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gramian.train.state.checkpoint import CheckpointStore, LoadedCheckpoint
from gramian.train.state.flat_state import extents, facts_of, load, tensors_of
from gramian.train.state.snapshot import Snapshots
from tests.kit.processes import RankError, distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.kit.waiting import PATIENCE

pytestmark = pytest.mark.xdist_group("processes")


class Net(nn.Module):
    """Dimensions that no number of processes divides, one with fewer rows than processes, tied weights, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.narrow = nn.Linear(5, 1, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        h = self.body(self.embed(ids)).tanh()
        return self.head(h) + self.narrow(h)


def built(seed: int, way: str, mesh: Any = None) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if way == "fsdp2":
        fully_shard(model.body, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    elif way == "ddp":
        model = DistributedDataParallel(model)
    return model, AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Every process sees the same samples, so that the number of processes changes nothing but rounding."""
    for step in steps:
        ids = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


def taken(snapshots: Snapshots, step: int, model: nn.Module, optimizer: Optimizer):
    facts = {"optimizer": facts_of(model, optimizer), "config_hash": "h", "step": step}
    return snapshots.take(step, tensors_of(model, optimizer), facts)


def resumed(store: CheckpointStore, model: nn.Module, optimizer: Optimizer) -> LoadedCheckpoint:
    loaded = store.newest("h")
    assert loaded is not None
    load(model, optimizer, loaded.parts(extents(model, loaded.shapes)), loaded.facts["optimizer"])
    return loaded


def gathered(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in whole(tensors_of(model, optimizer)).items()}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shards put together (collective)."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def written_by(rank: int, world_size: int, folder: str, way: str = "fsdp2") -> dict[str, Tensor]:
    """Two steps, a checkpoint, and on; the state at the checkpoint."""
    model, optimizer = built(0, way)
    train(model, optimizer, range(2))
    with CheckpointStore(folder, 2, rank, world_size) as store:
        store.write(taken(Snapshots(1), 2, model, optimizer))
        state = gathered(model, optimizer)
        train(model, optimizer, range(2, 4))
        assert store.wait() == []
    return state


def read_by(rank: int, world_size: int, folder: str, way: str = "fsdp2", there: int = 0) -> dict[str, Tensor]:
    """The state after a resume, in a model of another seed whose optimizer has done some steps."""
    model, optimizer = built(1, way)
    train(model, optimizer, range(50, 50 + there))
    with CheckpointStore(folder, 2, rank, world_size) as store:
        resumed(store, model, optimizer)
    return gathered(model, optimizer)


def on(world_size: int, function: Any, *args: Any) -> dict[str, Tensor]:
    """On so many sharded processes; 0: on this one, without any wrapper."""
    if world_size == 0:
        return function(0, 1, *args, "plain")
    states = run_on_ranks(world_size, function, *args)
    for state in states[1:]:
        assert_same(states[0], state)
    return states[0]


# ---- any number of processes -------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.full
def test_a_checkpoint_is_read_by_any_number_of_processes(tmp_path: Path) -> None:
    for writers in (0, 2, 3):
        folder = str(tmp_path / str(writers))
        state = on(writers, written_by, folder)
        for readers in (0, 2, 3):
            assert_same(on(readers, read_by, folder), state)


@pytest.mark.dist
@pytest.mark.full
def test_one_process_that_shards_reads_and_writes_as_well(tmp_path: Path) -> None:
    state = on(2, written_by, str(tmp_path / "2"))
    assert_same(on(1, read_by, str(tmp_path / "2")), state)
    state = on(1, written_by, str(tmp_path / "1"))
    assert_same(on(2, read_by, str(tmp_path / "1")), state)


@pytest.mark.parametrize("there", [0, 3])
@distributed(world_size=2)
def test_the_steps_after_a_resume_are_those_after_the_save_bit_for_bit(
    rank: int, world_size: int, tmp_path: Path, there: int
) -> None:
    model, optimizer = built(0, "fsdp2")
    train(model, optimizer, range(2))
    other, optimizer_of_other = built(1, "fsdp2")
    train(other, optimizer_of_other, range(50, 50 + there))
    with CheckpointStore(tmp_path, 2, rank, world_size) as store:
        store.write(taken(Snapshots(1), 2, model, optimizer))
        train(model, optimizer, range(2, 5))
        resumed(store, other, optimizer_of_other)
    train(other, optimizer_of_other, range(2, 5))
    assert all(isinstance(t, DTensor) for n, t in tensors_of(other, optimizer_of_other).items() if "exp_avg" in n)
    assert_same(gathered(other, optimizer_of_other), gathered(model, optimizer))
    assert facts_of(other, optimizer_of_other) == facts_of(model, optimizer)


@pytest.mark.full
@distributed(world_size=4)
def test_replicas_of_shards_are_written_once(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "fsdp2", init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    train(model, optimizer, range(2))
    with CheckpointStore(tmp_path, 2, rank, world_size) as store:
        snapshot = taken(Snapshots(1), 2, model, optimizer)
        store.write(snapshot)
        state = gathered(model, optimizer)
        loaded = store.newest()
        assert_same(loaded.tensors(), state)
        files = sum(path.stat().st_size for path in loaded.folder.glob("*.safetensors"))
        assert files < 1.5 * sum(t.nbytes for t in state.values()) + 20_000


# ---- in memory ---------------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_a_rollback_brings_back_the_shards(rank: int) -> None:
    model, optimizer = built(0, "fsdp2")
    snapshots = Snapshots(2)
    first = taken(snapshots, 0, model, optimizer)
    fresh = gathered(model, optimizer)
    train(model, optimizer, range(2))
    snapshot = taken(snapshots, 2, model, optimizer)
    state = gathered(model, optimizer)
    assert snapshot.sharded and snapshot.nbytes < 0.8 * sum(t.nbytes for t in state.values())
    train(model, optimizer, range(2, 4))
    load(model, optimizer, snapshots.before(3).parts, snapshot.facts["optimizer"])
    assert_same(gathered(model, optimizer), state)
    load(model, optimizer, first.parts, first.facts["optimizer"])
    assert not optimizer.state
    assert_same(gathered(model, optimizer), fresh)


@distributed(world_size=2)
def test_weights_that_an_evaluation_left_gathered_are_shards_again(rank: int) -> None:
    model, optimizer = built(0, "fsdp2")
    train(model, optimizer, range(1))
    snapshots = Snapshots(1)
    state = gathered(model, optimizer)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    snapshot = taken(snapshots, 1, model, optimizer)
    assert snapshot.parts["model.embed.weight"].extent.sharded
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    train(model, optimizer, range(5, 6))
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    load(model, optimizer, snapshot.parts, snapshot.facts["optimizer"])
    state["model.seen"] += 1
    assert_same(gathered(model, optimizer), state)
    train(model, optimizer, range(2))  # with what was loaded, not with what was gathered before
    other, optimizer_of_other = built(1, "fsdp2")
    load(other, optimizer_of_other, snapshot.parts, snapshot.facts["optimizer"])
    train(other, optimizer_of_other, range(2))
    assert_same(gathered(other, optimizer_of_other), gathered(model, optimizer))


# ---- on disk -----------------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_each_process_writes_its_shards_and_what_all_hold_is_written_once(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    old = os.umask(0)
    model, optimizer = built(0, "fsdp2")
    train(model, optimizer, range(1))
    with CheckpointStore(tmp_path / "c", 2, rank, world_size) as store:
        store.write(taken(Snapshots(1), 1, model, optimizer), best=True)
        assert store.wait() == []
        loaded = store.best()
        dist.barrier()
    os.umask(old)
    assert loaded.sharded and loaded.best
    names = sorted(path.name for path in loaded.folder.iterdir())
    assert names == ["facts.json", "manifest.json", "state-00001.safetensors", "state-00002.safetensors"]
    for path in loaded.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(loaded.folder.stat().st_mode) == 0o700
    from safetensors import safe_open

    held = []
    for name in names[2:]:
        with safe_open(loaded.folder / name, framework="pt") as file:
            held.append(set(file.keys()))
    assert "model.embed.weight" in held[0] & held[1]
    for name in ("model.seen", "optimizer.body.weight.step"):
        assert (name in held[0]) != (name in held[1])

    # Torch's own reader reads it into DTensors.
    other, optimizer_of_other = built(1, "fsdp2")
    targets = tensors_of(other)
    torch_load(dict(targets), storage_reader=HuggingFaceStorageReader(str(loaded.folder)), no_dist=True)
    assert_same(gathered(other, AdamW(other.parameters())), whole(tensors_of(model)))


@distributed(world_size=2)
def test_no_file_is_unpickled(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "fsdp2")
    with CheckpointStore(tmp_path, 2, rank, world_size) as store, pytest.MonkeyPatch.context() as patch:
        store.write(taken(Snapshots(1), 1, model, optimizer))
        store.wait()
        for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(owner, name, None)
        resumed(store, *built(1, "fsdp2"))


@distributed(world_size=2)
def test_training_communicates_while_a_save_is_under_way(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "fsdp2")
    go, real = threading.Event(), os.fsync

    def fsync(handle: int) -> None:
        assert go.wait(PATIENCE)
        time.sleep(0.02 * rank)
        real(handle)

    with CheckpointStore(tmp_path, 2, rank, world_size) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        store.write(taken(Snapshots(1), 0, model, optimizer))
        state = gathered(model, optimizer)
        train(model, optimizer, range(3))
        assert [name for name in os.listdir(tmp_path) if name.startswith("step")] == []
        go.set()
        train(model, optimizer, range(3, 5))
        assert_same(store.newest().tensors(), state)


@distributed(world_size=2)
def test_one_process_whose_disk_is_full_fails_the_save_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "fsdp2")
    events: list[dict[str, Any]] = []
    snapshots = Snapshots(1)
    with CheckpointStore(tmp_path, 1, rank, world_size, on_event=events.append) as store:
        store.write(taken(snapshots, 1, model, optimizer))
        assert store.wait() == []
        for step, bad in ((2, 1), (3, 0)):
            with pytest.MonkeyPatch.context() as patch:
                if rank == bad:

                    def write(handle: int, data: Any) -> int:
                        raise OSError(errno.ENOSPC, "No space left on device")

                    patch.setattr(os, "write", write)
                store.write(taken(snapshots, step, model, optimizer))
                errors = store.wait()
            assert len(errors) == 1 and f"rank {bad}: OSError: [Errno 28] No space left on device" in str(errors[0])
            assert "\n" not in str(errors[0]) and events[-1]["event"] == "checkpoint_failed"
            dist.barrier()
            assert os.listdir(tmp_path) == ["step-00000001"]
        assert store.newest().step == 1
        store.write(taken(snapshots, 4, model, optimizer))
        assert store.newest().step == 4 and store.wait() == []


@pytest.mark.parametrize("name", ["state-00001.safetensors", "state-00002.safetensors", "facts.json", "manifest.json"])
@distributed(world_size=2)
def test_all_processes_pass_over_a_checkpoint_that_one_finds_damaged(
    rank: int, world_size: int, tmp_path: Path, name: str
) -> None:
    model, optimizer = built(0, "fsdp2")
    events: list[dict[str, Any]] = []
    with CheckpointStore(tmp_path, 2, rank, world_size, on_event=events.append) as store:
        for step in (1, 2):
            store.write(taken(Snapshots(1), step, model, optimizer))
        store.wait()
        if rank == 0:
            path = tmp_path / "step-00000002" / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        dist.barrier()
        assert resumed(store, model, optimizer).step == 1
        assert [(e["folder"], e["reason"].split(":")[0]) for e in events if e["event"] == "checkpoint_skipped"] == [
            ("step-00000002", name)
        ]
        store.drop_after(1)
        store.write(taken(Snapshots(1), 2, model, optimizer))
        assert store.newest().step == 2 and store.wait() == []
        dist.barrier()
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@distributed(world_size=2)
def test_one_store_of_many_is_refused_for_shards(rank: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "fsdp2")
    with CheckpointStore(tmp_path, 2) as store, refusal("^world_size: 1, but the snapshot is sharded"):
        store.write(taken(Snapshots(1), 1, model, optimizer))


@distributed(world_size=2)
def test_of_replicas_rank_0_alone_writes_and_all_read_the_same(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = built(0, "ddp")
    train(model, optimizer, range(2))
    with CheckpointStore(tmp_path, 2, rank, world_size) as store:
        snapshot = taken(Snapshots(1), 2, model, optimizer)
        assert not snapshot.sharded and not any("module." in name for name in snapshot.parts)
        store.write(snapshot)
        state = gathered(model, optimizer)
        other, optimizer_of_other = built(1, "fsdp2")
        assert resumed(store, other, optimizer_of_other).step == 2
        dist.barrier()
        assert sorted(os.listdir(tmp_path / "step-00000002")) == ["facts.json", "manifest.json", "state.safetensors"]
    assert_same(gathered(other, optimizer_of_other), state)


def killed_inside_a_save(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = built(0, "fsdp2")
    store = CheckpointStore(folder, 2, rank, world_size)
    store.write(taken(Snapshots(1), 1, model, optimizer))
    store.wait()
    dist.barrier()
    if rank == 1:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    store.write(taken(Snapshots(1), 2, model, optimizer))
    store.wait()


@pytest.mark.dist
def test_a_process_killed_inside_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_on_ranks(2, killed_inside_a_save, str(tmp_path))
    with CheckpointStore(tmp_path, 2) as store:
        assert store.newest().step == 1 and store.newest().tensors()
