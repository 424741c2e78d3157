"""The row proof in matrices whose subject is something else: one in eight of their cells runs it.

A proof takes most of the time of a small model. Cells of tests marked ``few_proofs`` compare what is captured with an oracle of
their own; seven in eight run as with ``proof="off"``. A hash of their names decides which, so that no value of an axis is left
out of the proven ones; of the whole matrices (``GRAMIAN_FULL=1``) these are more than a thousand. ``few_proofs(short=True)`` is
for the short run alone: in the whole one, all cells are proven.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from gramian.taps.hub import Hub
from tests.kit.matrix import FULL

EVERY = 8
"""One of so many cells is proven, unless a test's own marker says `every`: 1 where the proof is part of its subject."""
_WITHOUT = pytest.StashKey[bool]()
_without = False


def choose(cells: Sequence[pytest.Item]) -> None:
    """Decide which cells of a matrix have proofs. In the short run fewer of them than `every` are cells of all such tests."""
    marker = cells[0].get_closest_marker("few_proofs")
    if marker is None or (FULL and (len(cells) == 1 or marker.kwargs.get("short"))):
        return
    every = marker.kwargs.get("every", EVERY)
    few = not FULL and len(cells) < every
    for number, item in enumerate(sorted(cells, key=_order)):
        item.stash[_WITHOUT] = (_order(item) if few else number) % every != 0


def _order(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


@contextmanager
def as_chosen(item: pytest.Item) -> Iterator[None]:
    """Run a test with its proofs or without them."""
    with switched_off(item.stash.get(_WITHOUT, False)):
        yield


@contextmanager
def switched_off(off: bool) -> Iterator[None]:
    """If `off`, whoever listens to a model from here on does so as with ``proof="off"``, unless it asks for a period."""
    global _without
    before, attach = _without, Hub.attach

    def attach_without(hub: Hub, listener: object) -> None:
        listener.proof = "off" if listener.proof == "auto" else listener.proof
        attach(hub, listener)

    if off:
        _without, Hub.attach = True, attach_without
    try:
        yield
    finally:
        _without, Hub.attach = before, attach


def are_off() -> bool:
    """True inside `switched_off(True)`; other processes are to be told."""
    return _without
