"""Ranks announce that they will join a collective, or why they cannot, before any of them waits inside it.

A process that failed half-way cannot report it by a collective: other ranks may be inside one of the model's own (DDP, FSDP2),
and the two would be mixed up. Instead it writes a message to the group's key-value store and exits. Ranks that join read the
message, so none waits inside a collective for a process that is gone. A rendezvous uses two keys of the store, a counter and a
message, whatever the number of processes.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_process_group_store

from gramian.core.errors import GramianError

_numbers: dict[str, int] = {}
"""{name of a process group: the last number that `next_number` returned for it}."""
PATIENCE = timedelta(minutes=30)
ALL_HERE = "all here"
ONCE, TWICE = "a backward", "a backward that runs twice"
PLACES, BITS = ("a forward", ONCE, TWICE, "the end of a backward", "an optimizer step"), 12
"""Where processes of a model meet, and the bits of a counter for each, which allow for 4095 processes."""


def next_number(group: Any) -> int:
    """The next number, from 0, for a process group (None: the default one); equal on all processes that call it equally often.

    For names of rendezvous, which must not be used twice.
    """
    name = _group(group).group_name
    _numbers[name] = _numbers.get(name, -1) + 1
    return _numbers[name]


def _by_place(counter: int) -> dict[str, int]:
    """{place: how many processes came to it} of a rendezvous' counter; without the places to which none came."""
    counts = {place: counter >> BITS * number & (1 << BITS) - 1 for number, place in enumerate(PLACES)}
    return {place: count for place, count in counts.items() if count}


def _group(group: Any) -> Any:
    return group if group is not None else _get_default_group()


@dataclass(frozen=True)
class Rendezvous:
    """A meeting point before one collective that all processes of a group must join; uses the group's key-value store."""

    group: Any
    """Process group of the collective; None: the default one."""
    name: str
    """Name of the rendezvous: the same on all processes, and never used twice."""
    patience: timedelta = PATIENCE
    """How long a process waits for the others."""

    def wait_for_all(self, before: "Rendezvous | None" = None, place: str = PLACES[0]) -> str:
        """Join, and wait until all other ranks have joined or one has declined.

        Args:
            before: an earlier rendezvous, whose keys are deleted once all have joined this one; None: nothing is deleted.
            place: one of `PLACES`, where this process is; the counter has `BITS` bits for each of them.

        Returns:
            "" if all are at one place, `TWICE` if at `ONCE` and `TWICE`, else "process R: reason" of the one that declined,
            or how many are at which place.

        Raises:
            GramianError: if the other ranks do not join within `patience`.
        """
        store, size = self._store(), dist.get_world_size(self.group)
        here = _by_place(store.add("here", 1 << BITS * PLACES.index(place)))
        if sum(here.values()) == size:
            places = " and ".join(f"{count} at {place}" for place, count in here.items())
            apart = (
                f"step: processes are {places}; expected as many forwards, backwards and steps of each, samples or none"
            )
            message = ALL_HERE if len(here) == 1 else TWICE if here.keys() == {ONCE, TWICE} else apart
            store.set("word", message)
            if before is not None:
                before._forget()
        else:
            try:
                store.wait(["word"], self.patience)
            except RuntimeError:  # torch.distributed.DistStoreError is one
                came = sum(_by_place(store.add("here", 0)).values())
                raise GramianError(
                    f"process_group: {came} of {size} processes came to {self.name} within {self.patience}; expected all"
                ) from None
            message = store.get("word").decode()
        return "" if message == ALL_HERE else message

    def decline(self, why: str) -> None:
        """Report that this process cannot join, and why; the other ranks read the first such reason. Does not wait."""
        rank = dist.get_rank(self.group)
        self._store().compare_set("word", "", f"process {rank}: {' '.join(why.split())}")

    def _store(self) -> Any:
        return PrefixStore(f"gramian/{self.name}", _get_process_group_store(_group(self.group)))

    def _forget(self) -> None:
        store = self._store()
        for key in ("here", "word"):
            store.delete_key(key)
