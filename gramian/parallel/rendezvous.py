"""Saying that one comes to a collective, or why not, before anyone waits inside it.

A process that failed half-way cannot take part in a collective: the others may be inside one of the model's own (DDP, FSDP2),
and the two would be taken for each other. It leaves a word in the group's store instead and goes; those that come read it. So
nobody waits inside a collective for somebody who is gone. One counter and one word for each meeting, whatever the world size.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_process_group_store

from gramian.core.errors import GramianError

_joined: dict[str, int] = {}
"""{group: objects that have met in it}."""
PATIENCE = timedelta(minutes=30)
ALL_HERE = "all here"


def number_in(group: Any) -> int:
    """A new number, the same on all processes of a group that ask for numbers in the same order; None: the default group."""
    name = _group(group).group_name
    _joined[name] = _joined.get(name, -1) + 1
    return _joined[name]


def _group(group: Any) -> Any:
    return group if group is not None else _get_default_group()


@dataclass(frozen=True)
class Rendezvous:
    """One collective that all processes of a group must want."""

    group: Any
    """None: the default one."""
    name: str
    """The same on all processes, and never used twice."""

    def come(self, before: "Rendezvous | None" = None) -> str:
        """Wait until all others come too.

        Args:
            before: a meeting that is over once this one is held; what the store keeps of it is thrown away.

        Returns:
            "" if all do, else which process does not, and why.

        Raises:
            GramianError: if the others do not come within `PATIENCE`.
        """
        store, size = self._store(), dist.get_world_size(self.group)
        if store.add("here", 1) == size:
            store.set("word", ALL_HERE)
            if before is not None:
                before._forget()
        try:
            store.wait(["word"], PATIENCE)
        except RuntimeError:  # torch.distributed.DistStoreError is one
            here = store.add("here", 0)
            raise GramianError(
                f"process_group: {here} of {size} processes came to {self.name} within {PATIENCE}; expected all of them"
            ) from None
        word: str = store.get("word").decode()
        return "" if word == ALL_HERE else word

    def stay_away(self, why: str) -> None:
        """Let the others know; waits for nobody. The first who says so is heard."""
        rank = dist.get_rank(self.group)
        self._store().compare_set("word", "", f"process {rank}: {' '.join(why.split())}")

    def _store(self) -> Any:
        return PrefixStore(f"gramian/{self.name}", _get_process_group_store(_group(self.group)))

    def _forget(self) -> None:
        store = self._store()
        for key in ("here", "word"):
            store.delete_key(key)
