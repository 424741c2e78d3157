"""Several processes as threads of this one: an exchange over lists, so that many splits are tried in little time.

Every thread is a rank. It runs the library as a process would; only the collectives and the meeting are these.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gramian.curvature.refresh import refresh_schedule
from gramian.parallel.exchange import Exchange
from gramian.taps.hub import Hub, hub_of
from gramian.taps.proof import batch_proof
from tests.kit.waiting import PATIENCE

one_at_a_time = threading.RLock()
"""For what threads share and processes do not: the global generator, and the list of all models with open captures."""


class Room:
    """Where ranks lay something down and see what the others laid down."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.places = size, threading.Barrier(size), [None] * size
        self.words: dict[str, Any] = {}
        self.changed = threading.Condition()

    def share(self, rank: int, what: Any) -> list[Any]:
        self.places[rank] = what
        self.barrier.wait(PATIENCE)
        found = list(self.places)
        self.barrier.wait(PATIENCE)
        return found


class Loopback(Exchange):
    """One rank of a room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size, self.group = room, rank, room.size, (room, rank)
        self.sent = {"all_reduce": 0, "all_gather": 0, "all_to_all": 0}
        self.calls: list[str] = []

    def _all_reduce(self, t: Tensor, dtype: torch.dtype, op: Any) -> Tensor:
        parts = self._share(f"all_reduce {list(t.shape)} {dtype}", t.detach().to(dtype))
        self.sent["all_reduce"] += 2 * parts[self.rank].nbytes * (self.size - 1) // self.size
        stacked = torch.stack(parts)
        return stacked.sum(0) if op == torch.distributed.ReduceOp.SUM else stacked.amax(0)

    def _gather_even(self, piece: Tensor) -> Tensor:
        self.sent["all_gather"] += (self.size - 1) * piece.nbytes
        return torch.cat(self._share(f"all_gather {list(piece.shape)}", piece.detach()))

    def gather_rows(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        self._check(rows_TN, counts)
        self.sent["all_gather"] += (self.size - 1) * rows_TN.nbytes
        return torch.cat(self._share(f"gather_rows {counts} {rows_TN.dtype}", rows_TN.detach()))

    def reshard(self, rows_TN: Tensor, counts: list[int]) -> Tensor:
        self._check(rows_TN, counts)
        mine = self.features(rows_TN.shape[1])[self.rank]
        self.sent["all_to_all"] += (rows_TN.shape[1] - (mine.stop - mine.start)) * len(rows_TN) * rows_TN.itemsize
        parts = self._share(f"reshard {counts} {rows_TN.dtype}", rows_TN.detach())
        return torch.cat([part[:, mine] for part in parts])

    def broadcast(self, t: Tensor | None, shape: Any, like: Tensor, source: int) -> Tensor:
        mine = t if t is not None and source == self.rank else like.new_empty(0)
        return self._share(f"hand {list(shape)} {like.dtype} {source}", mine)[source].view(*shape)

    def _share(self, call: str, what: Tensor) -> list[Tensor]:
        """All ranks must be at the same call: that is what a process group would hang on."""
        self.calls.append(call)
        said = self.room.share(self.rank, (call, what.clone()))
        assert len({name for name, _ in said}) == 1, f"ranks are at different collectives: {said}"
        return [thing for _, thing in said]


class LoopbackRendezvous:
    """`gramian.parallel.rendezvous.Rendezvous` among threads."""

    def __init__(self, group: tuple[Room, int], name: str) -> None:
        (self.room, self.rank), self.name = group, name

    def wait_for_all(self, before: Any = None) -> str:
        room = self.room
        with room.changed:
            here = room.words.setdefault(self.name, {"here": 0, "absent": ""})
            here["here"] += 1
            room.changed.notify_all()
            ready = room.changed.wait_for(lambda: here["here"] == room.size or here["absent"], PATIENCE)
            assert ready, f"{here['here']} of {room.size} ranks came to {self.name}"
            return str(here["absent"])

    def decline(self, why: str) -> None:
        with self.room.changed:
            here = self.room.words.setdefault(self.name, {"here": 0, "absent": ""})
            here["absent"] = here["absent"] or f"process {self.rank}: {' '.join(why.split())}"
            self.room.changed.notify_all()


_here = threading.local()


@contextmanager
def _patched() -> Any:
    def exchange_of(group: Any, device: Any) -> Loopback | None:
        return getattr(_here, "exchange", None)

    def world_size(group: Any) -> int:
        return getattr(getattr(_here, "exchange", None), "size", 1)

    plain = Hub._set_flags

    def set_flags(hub: Hub) -> None:
        with one_at_a_time:
            plain(hub)

    prove = batch_proof.undisturbed

    @contextmanager
    def undisturbed(*arguments: Any) -> Any:
        with one_at_a_time, prove(*arguments):  # it restores the global generator
            yield

    with (
        mock.patch.object(Hub, "_set_flags", set_flags),
        mock.patch.object(batch_proof, "undisturbed", undisturbed),
        mock.patch.object(refresh_schedule, "exchange_of", exchange_of),
        mock.patch.object(refresh_schedule, "Rendezvous", LoopbackRendezvous),
        mock.patch.object(refresh_schedule, "world_size", world_size),
        mock.patch.object(
            refresh_schedule, "next_number", lambda group: 0
        ),  # threads share a counter, processes do not
    ):
        somebody = nn.Linear(1, 1)
        hub_of(somebody).live = True  # so that no thread, leaving its capture, takes itself for the last that listens
        try:
            yield
        finally:
            hub_of(somebody)._set_flags()


def on_threads(size: int, body: Callable[[int, Loopback], Any]) -> list[Any]:
    """Call body(rank, exchange) on every rank; what each returned. The first error of any rank is raised."""
    room, found, errors = Room(size), [None] * size, {}

    def run(rank: int) -> None:
        _here.exchange = Loopback(room, rank)
        try:
            found[rank] = body(rank, _here.exchange)
        except BaseException as error:
            errors[rank] = error
            room.barrier.abort()

    with _patched():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors.values():
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise next(iter(errors.values()))
    return found
