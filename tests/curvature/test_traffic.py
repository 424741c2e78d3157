"""The model of what K-FAC sends: crossovers lie where the bytes are equal, and forms follow the policy."""

import pytest

from benchmarks import _traffic as traffic
from benchmarks._traffic import TrafficSide

RANKS = (2, 3, 8, 1024)
DTYPES = ((2, 4), (4, 4), (8, 8))


def sent(side: TrafficSide, reduction: str, with_gram_matrix: bool = False) -> int:
    parts = [side.join(reduction)] + [side.gram(reduction)] * with_gram_matrix
    return sum(traffic.total(*parts).values())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("row", "whole"), DTYPES)
def test_crossovers_lie_where_bytes_are_equal(ranks, row, whole):
    """Of sides so large that rounding to whole tokens and bytes does not count."""
    width = 1024 * 100

    def differ(tokens: float, one: str, other: str, gram_matrix: bool) -> float:
        side = TrafficSide.even(width, round(tokens / ranks) * ranks, ranks, row, whole)
        a, b = sent(side, one, gram_matrix), sent(side, other, gram_matrix)
        return abs(a - b) / b

    assert differ(traffic.gather_meets_dense(width, row, whole), "gather", "dense", False) < 2e-2
    assert differ(traffic.gram_meets_dense(width, ranks, row, whole, False), "gram", "dense", False) < 1e-3
    assert differ(traffic.gram_meets_dense(width, ranks, row, whole), "gram", "dense", True) < 2e-2
    assert differ(traffic.gram_meets_gather(width, ranks, row), "gram", "gather", True) < 0.1


@pytest.mark.parametrize("ranks", RANKS)
def test_on_either_side_of_a_crossover_the_other_sends_less(ranks):
    width = 4096
    for tokens, one, other in (
        (traffic.gather_meets_dense(width), "gather", "dense"),
        (traffic.gram_meets_dense(width, ranks), "gram", "dense"),
        (traffic.gram_meets_gather(width, ranks), "gram", "gather"),
    ):
        few, many = (TrafficSide.even(width, int(tokens * by) // ranks * ranks + ranks, ranks) for by in (0.5, 2.0))
        if ranks < tokens / 4:  # else a rank has one token or none, and no half of it
            assert sent(few, one, True) < sent(few, other, True)
        assert sent(many, one, True) > sent(many, other, True)


def test_uses_until_gram_has_sent_more():
    side = TrafficSide.even(16_000, 512, 8)
    for other in ("gather", "dense"):
        uses = traffic.uses_until(side, other, columns=64)
        assert uses > 1
        spent = sent(side, "gram", True) + int(uses) * sum(side.use("gram", 64).values())
        assert spent <= sent(side, other) < spent + sum(side.use("gram", 64).values())
    assert traffic.uses_until(TrafficSide.even(512, 500, 8), "gather", columns=64) < 0


def test_tokens_are_spread_evenly():
    assert TrafficSide.even(10, 7, 3).tokens == (3, 2, 2)
    assert [TrafficSide(10, (1, 1, 1)).features(rank) for rank in range(3)] == [4, 3, 3]


def test_what_the_option_becomes():
    wide, narrow = TrafficSide.even(20_000, 100, 2), TrafficSide.even(64, 100, 2)
    assert [wide.taken(asked, 8192) for asked in ("gram", "gather", "dense")] == ["gram", "gather", "gather"]
    assert [narrow.taken(asked, 63) for asked in ("gram", "gather", "dense")] == ["dense"] * 3
    assert [narrow.taken(asked, 200) for asked in ("gram", "gather", "dense")] == ["gram", "gather", "dense"]


def test_one_process_sends_nothing():
    side = TrafficSide.even(64, 9, 1)
    for reduction in ("gram", "gather", "dense"):
        parts = (side.join(reduction), side.settle(reduction), side.gram(reduction), side.use(reduction, 5))
        assert traffic.total(*parts) == {}


def test_what_a_process_holds():
    side = TrafficSide.even(100, 8, 4)
    assert [side.stored(how) for how in ("gram", "gather", "dense")] == [2 * 8 * 25, 2 * 8 * 100, 2 * 100**2]
    assert sum(TrafficSide(10, (1, 2, 0)).stored("gram", rank) for rank in range(3)) == TrafficSide(
        10, (1, 2, 0)
    ).stored("gather")
