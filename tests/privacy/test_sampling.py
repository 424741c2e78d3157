"""Poisson draws: a pure function of key, number and record; independent inclusions; the same on any number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from gramian.kernels import chacha
from gramian.privacy.sampling import poisson
from gramian.privacy.sampling.poisson import PoissonBatchSampler, draw, pieces, share
from tests.kit.refusals import refusal

KEY = bytes(range(32))


def test_a_record_takes_part_iff_its_uniform_is_below_the_rate():
    words = chacha.words(KEY, 5, 0, 400).numpy().tolist()
    uniforms = [((words[2 * i] << 32 | words[2 * i + 1]) >> 11) / 2**53 for i in range(200)]
    assert draw(KEY, 5, 200, 0.3).tolist() == [i for i, u in enumerate(uniforms) if u < 0.3]
    edge = sorted(uniforms)[60]
    assert len(draw(KEY, 5, 200, edge)) == 60 and len(draw(KEY, 5, 200, np.nextafter(edge, 1))) == 61


def test_a_draw_is_a_pure_function_that_chunks_do_not_change(monkeypatch):
    whole = draw(KEY, 1, 1000, 0.2)
    monkeypatch.setattr(poisson, "_CHUNK", 33)
    assert np.array_equal(draw(KEY, 1, 1000, 0.2), whole) and whole.dtype == np.int64
    assert not np.array_equal(draw(KEY, 2, 1000, 0.2), whole)
    assert not np.array_equal(draw(KEY[::-1], 1, 1000, 0.2), whole)
    assert draw(KEY, 1, 50, 1.0).tolist() == list(range(50))


def test_a_larger_rate_only_adds_records():
    small, large = draw(KEY, 3, 500, 0.1), draw(KEY, 3, 500, 0.4)
    assert set(small) < set(large)


def test_inclusions_are_independent_with_the_given_rate():
    """Counts, per-record totals and pair products at six standard errors: below 1e-8 of a false alarm for a fresh key."""
    size, draws, rate = 200, 2000, 0.07
    taken = np.zeros((draws, size))
    for number in range(draws):
        taken[number, draw(KEY, number, size, rate)] = 1
    deviation = (rate * (1 - rate)) ** 0.5
    centred = (taken - rate) / deviation
    assert abs(centred.sum()) < 6 * (size * draws) ** 0.5, "the rate"
    assert abs(centred.sum(0)).max() < 6 * draws**0.5, "of every record"
    variance = taken.sum(1).var()
    assert abs(variance / (size * rate * (1 - rate)) - 1) < 6 * (2 / draws) ** 0.5, "the size of a draw is binomial"
    neighbours = (centred[:, 1:] * centred[:, :-1]).sum()
    assert abs(neighbours) < 6 * ((size - 1) * draws) ** 0.5, "between neighbours"
    successive = (centred[1:] * centred[:-1]).sum()
    assert abs(successive) < 6 * (size * (draws - 1)) ** 0.5, "between draws"


@settings(max_examples=60)
@given(
    number=st.integers(0, 2**64),
    size=st.integers(1, 60),
    rate=st.floats(0.01, 1.0),
    world=st.integers(1, 5),
    most=st.one_of(st.none(), st.integers(1, 9)),
)
def test_ranks_split_the_same_draw_into_equally_many_pieces(number, size, rate, world, most):
    whole = draw(KEY, number, size, rate)
    per_rank = [
        PoissonBatchSampler(KEY, size, rate, 1, rank=rank, world_size=world, max_physical_batch=most).pieces_of(number)
        for rank in range(world)
    ]
    assert len({len(of_rank) for of_rank in per_rank}) == 1
    everyone = [i for of_rank in per_rank for piece in of_rank for i in piece.indices]
    assert sorted(everyone) == whole.tolist()
    for rank, of_rank in enumerate(per_rank):
        assert [i for piece in of_rank for i in piece.indices] == share(whole, rank, world).tolist()
        assert all(len(piece.indices) <= (most or size) for piece in of_rank)
        assert [(p.draw, p.piece, p.last) for p in of_rank] == [
            (number, k, k == len(of_rank) - 1) for k in range(len(of_rank))
        ]
    largest = -(-len(whole) // world)
    assert len(per_rank[0]) == pieces(largest, most)


def test_a_rank_with_a_smaller_share_runs_an_empty_piece():
    number = next(n for n in range(100) if len(draw(KEY, n, 20, 0.2)) == 5)
    of_ranks = [
        PoissonBatchSampler(KEY, 20, 0.2, 1, rank=rank, world_size=2, max_physical_batch=2).pieces_of(number)
        for rank in (0, 1)
    ]
    assert [[len(piece.indices) for piece in pieces] for pieces in of_ranks] == [[2, 1], [2, 0]]


def test_pieces_are_at_least_one_and_enough():
    assert [pieces(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
    assert pieces(1000, None) == 1


def test_an_epoch_starts_where_the_counter_stands():
    at = 0
    sampler = PoissonBatchSampler(KEY, 40, 0.1, 6, next_draw=lambda: at)
    first = list(sampler)
    at = 4
    assert list(sampler)[:2] == first[4:] and len(sampler) == 6
    assert list(itertools.chain(*first)) != list(itertools.chain(*list(sampler)))


def test_empty_draws_are_counted_and_not_yielded():
    sampler = PoissonBatchSampler(KEY, 3, 0.05, 50, max_physical_batch=2)
    batches = list(sampler)
    assert len(sampler.begun) == 50 and [] not in batches
    assert [piece.indices for piece in sampler.begun if piece.indices] == batches


def test_it_is_a_batch_sampler():
    import torch

    sampler = PoissonBatchSampler(KEY, 40, 0.5, 3)
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=sampler)
    assert [batch[0].tolist() for batch in loader] == list(sampler)


@pytest.mark.parametrize(
    "field, call",
    [
        ("sample_rate", lambda: draw(KEY, 0, 10, 0.0)),
        ("sample_rate", lambda: draw(KEY, 0, 10, 1.01)),
        ("sample_rate", lambda: draw(KEY, 0, 10, float("nan"))),
        ("dataset", lambda: draw(KEY, 0, 0, 0.5)),
        ("rank", lambda: share(np.arange(3), 2, 2)),
        ("rank", lambda: PoissonBatchSampler(KEY, 10, 0.5, 1, rank=-1)),
        ("max_physical_batch", lambda: pieces(3, 0)),
        ("max_physical_batch", lambda: PoissonBatchSampler(KEY, 10, 0.5, 1, max_physical_batch=0)),
        ("steps", lambda: PoissonBatchSampler(KEY, 10, 0.5, 0)),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(field, call):
    with refusal(rf"^{field}: .*; expected .*$"):
        call()
