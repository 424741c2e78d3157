"""Whatever is typed ends in a result or in one line that names what is wrong, soon, and a refusal changes no file.

60 cases of fixed seeds; with GRAMIAN_FULL=1, 2,000 of the run's seed. ``python -m tests.cli.fuzz_judge SEED`` repeats one.
"""

import pytest

from gramian.cli import COMMANDS
from tests.cli.fuzz_judge import judge, tally
from tests.cli.fuzzed import Case, case
from tests.cli.fuzzed_named import NAMED
from tests.kit.matrix import FULL
from tests.kit.seeds import SEED

CASES, PARTS = (2_000, 8) if FULL else (60, 1)

pytestmark = [] if FULL else [pytest.mark.xdist_group("fuzz")]  # who shares the files of the cases


@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_ends_in_a_result_or_in_one_line(part: int) -> None:
    count = CASES // PARTS
    first = (SEED << 20) + part * count
    found = [judge(case(seed)) for seed in range(first, first + count)]
    faults = [str(one) for one in found if one.fault]
    assert not faults, f"{tally(found)}\n" + "\n\n".join(faults[:10])


@pytest.mark.parametrize("name", NAMED)
def test_a_case_that_was_a_bug_is_one_line(name: str) -> None:
    argv, config, words = NAMED[name]
    found = judge(Case(-1, name, argv, config, refused=True))
    assert not found.fault and found.line.startswith(f"gramian: {words}"), str(found)


def test_a_seed_gives_the_same_case_every_time() -> None:
    assert [case(seed) for seed in range(50)] == [case(seed) for seed in range(50)]


def test_every_command_is_drawn_valid_and_broken() -> None:
    drawn = [case(seed) for seed in range(1500)]
    for command in COMMANDS:
        kinds = {one.kind for one in drawn if one.argv[:1] == (command,)}
        assert {"valid", "argument"} <= kinds, (command, kinds)
