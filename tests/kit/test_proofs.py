"""Cells of a matrix marked few_proofs run the row proof or not, as chosen; elsewhere nothing changes."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gramian
from gramian.taps.hub import Hub, hub_of
from tests.kit import proofs
from tests.kit.matrix import FULL
from tests.kit.processes import distributed, run_on_ranks

CELLS = range(3 * proofs.EVERY)
PROVEN: list[int] = []


def is_proven(proof: str | int = "auto") -> bool:
    """True if a capture of a small model runs the row proof."""
    model = nn.Linear(3, 2)
    with gramian.per_sample_norms(model, "sum", proof=proof):
        model(torch.randn(4, 3)).square().sum().backward()
        return bool(hub_of(model).proof.proven)


@pytest.fixture(scope="module")
def tally() -> Iterator[None]:
    """Nothing but the marked cells runs in between; the count is looked at when they are over."""
    yield
    assert len(PROVEN) == len(CELLS) // proofs.EVERY


@pytest.mark.xdist_group("proofs")
@pytest.mark.few_proofs
@pytest.mark.parametrize("cell", CELLS)
def test_one_cell_of_so_many_is_proven(cell: int, tally: None) -> None:
    proven = is_proven()
    assert proven is not proofs.are_off()
    PROVEN.extend([cell] * proven)


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("cell", range(3))
def test_a_test_says_that_all_of_its_cells_are_proven(cell: int) -> None:
    assert is_proven()


@pytest.mark.few_proofs(short=True)
@pytest.mark.parametrize("cell", range(3))
def test_a_test_says_that_cells_are_left_out_in_the_short_run_alone(cell: int) -> None:
    assert is_proven() is not proofs.are_off()
    assert is_proven() or not FULL


@pytest.mark.few_proofs
def test_a_test_alone_is_proven_in_the_whole_run() -> None:
    assert is_proven() is not proofs.are_off()
    assert is_proven() or not FULL


@pytest.mark.parametrize("off", [False, True])
def test_switched_off_is_as_the_option_and_ends(off: bool) -> None:
    attach = Hub.attach
    with proofs.switched_off(off):
        assert is_proven() is not off
        assert is_proven(1)  # whoever asks for a period has it
    assert Hub.attach is attach and is_proven()


def own_state(rank: int, world_size: int) -> bool:
    return is_proven()


@distributed(world_size=2)
def test_other_processes_are_proven_by_default(rank: int, world_size: int) -> None:
    assert is_proven()


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("off", [True, False])
def test_other_processes_do_as_this_one(off: bool) -> None:
    with proofs.switched_off(off):
        assert run_on_ranks(2, own_state) == [not off] * 2
