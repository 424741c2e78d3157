"""Whatever a root does between its layers, a capture is exact or refuses: random programs against the single-sample loop.

120 programs of fixed seeds; with GRAMIAN_FULL=1, 6,000 of fresh ones. A failure prints the seed of the program:
``outcome(seed)`` of `tests.kit.programs` repeats it. The counts of outcomes are printed at the end of the run.
"""

import random
from collections.abc import Callable

import pytest
import torch

from tests.kit.matrix import FULL, sample
from tests.kit.programs import Outcome, Program, outcome, private_outcome, tally
from tests.kit.programs.grammar import ORDINARY, RETURNS, UNUSUAL
from tests.kit.programs.named import EITHER, NAMED
from tests.kit.programs.truth import truth

pytestmark = pytest.mark.oracle

SHORT = 120
"""Programs of the short run: as many as it takes until all productions are drawn."""
PROGRAMS, PARTS = (6_000, 24) if FULL else (SHORT, 6)
PRIVATE, PRIVATE_PARTS = (1_000, 10) if FULL else (24, 4)
RARE = {"above_the_mean"}
"""Productions that fit large batches alone, which are rarely drawn."""


def seeds(part: int, count: int) -> range:
    """Seeds of one part: the first ones in order, or anywhere in the whole run."""
    first = random.SystemRandom().randrange(2**30) if FULL else part * count
    return range(first, first + count)


def check(judge: Callable[[int], Outcome], some: range, count: Callable[[str, object], None]) -> None:
    """No program is wrong, and none that must be exact is refused."""
    outcomes = [judge(seed) for seed in some]
    count("programs", tally(outcomes))
    bad = [str(one) for one in outcomes if not one.right]
    assert not bad, f"{len(bad)} of {len(outcomes)} programs:\n" + "\n".join(bad[:20])


@pytest.mark.parametrize("part", range(PARTS))
def test_norms_of_every_program_are_exact_or_refused(part: int, record_property: Callable[[str, object], None]) -> None:
    check(outcome, seeds(part, PROGRAMS // PARTS), record_property)


@pytest.mark.parametrize("part", range(PRIVATE_PARTS))
def test_the_private_sum_of_every_program_is_the_loops_and_moves_by_at_most_C(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    check(private_outcome, seeds(part, PRIVATE // PRIVATE_PARTS), record_property)


@pytest.mark.parametrize("name", NAMED)
def test_norms_of_a_named_program(name: str) -> None:
    found, expected = outcome(NAMED[name].program), NAMED[name].norms
    assert found.right and (expected == EITHER or found.kind == expected), str(found)


@pytest.mark.parametrize("name", sample(list(NAMED), 24, case=lambda name: NAMED[name][1:]))
def test_the_private_sum_of_a_named_program(name: str) -> None:
    found, expected = private_outcome(NAMED[name].program), NAMED[name].private
    assert found.right and (expected == EITHER or found.kind == expected), str(found)


def test_the_programs_of_the_short_run_have_every_production() -> None:
    drawn = {name for seed in range(SHORT) for name in Program(seed).used}
    assert drawn | RARE == {*ORDINARY, *UNUSUAL, *RETURNS}


def test_a_seed_gives_the_same_program_every_time() -> None:
    for seed in range(20 if FULL else 8):
        first, second = Program(seed), Program(seed)
        assert first.draft.used == second.draft.used
        torch.testing.assert_close(truth(first).g_BP, truth(second).g_BP, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({*ORDINARY, *RETURNS} - {"token_mean_loss", "pooled_without_mask"}))
def test_samples_are_independent_in_ordinary_productions(name: str) -> None:
    chain = (name,) if name in RETURNS else (f"{name}(linear)", "rows")
    given = {"random": name == "dropout", "ragged": name == "pooled_with_mask", "reduction": "mean"}
    program = Program(3, chain, tuple(given.items()))
    assert program.draft.sample_major and name in program.used
    assert truth(program, collate=True).separable


@pytest.mark.parametrize("name", ["centred", "flipped", "gradient_centred", "gradient_over_its_norm", "balanced_gate"])
def test_the_oracle_sees_samples_that_depend_on_each_other(name: str) -> None:
    assert not truth(Program(5, (name, "rows"), (("random", False), ("ragged", False)))).separable


def test_the_oracle_sees_padding_that_depends_on_other_records() -> None:
    assert not truth(NAMED["pooling over padding"].program, collate=True).separable
    assert truth(NAMED["pooling with a mask"].program, collate=True).separable
