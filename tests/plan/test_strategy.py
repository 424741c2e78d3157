"""The placement planner: the fastest that fits, and refusals that say what would."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.plan.budget import USABLE
from gramian.plan.parallel_strategy import Decision, decide
from gramian.plan.transformer_memory import Kind, Needs, TeacherShape, gpt

SEVEN = gpt(50257, 2048, 32, 4096, 32)
RUN = Needs(SEVEN, "bf16", length=2048, batch=64, micro_batch=4)
SMALL = Needs(gpt(50257, 1024, 12, 768, 12), "bf16", length=1024, batch=64, micro_batch=8)
GB = 10**9


def part(decision: Decision, what: str, column: int = 0) -> int:
    return next(row.sizes[column] for row in decision.rows if row.what == what)


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs, gpus, memory, strategy",
    [
        (SMALL, 1, 80, "one"),
        (SMALL, 8, 80, "ddp"),
        (SMALL, 1, 8, None),
        (RUN, 1, 80, None),
        (RUN, 1, 192, "one"),
        (RUN, 8, 192, "ddp"),
        (RUN, 8, 141, "fsdp2"),
        (RUN, 8, 80, None),
        (replace(RUN, checkpoint_blocks=4), 8, 80, "fsdp2"),
        (RUN, 64, 80, "fsdp2"),
    ],
)
def test_without_a_teacher(needs: Needs, gpus: int, memory: int, strategy: str | None) -> None:
    assert decide(needs, gpus, memory * GB).strategy == strategy


BIG = TeacherShape(gpt(50257, 2048, 48, 6144, 48))
"""22 billion parameters."""


@pytest.mark.parametrize(
    "student, gpus, memory, strategy, layout",
    [
        (SMALL, 1, 80, "one", "one"),
        (SMALL, 8, 80, "ddp", "ddp"),
        (SMALL, 8, 40, "fsdp2 teacher + ddp student", "ddp"),
        (replace(RUN, checkpoint_blocks=4, micro_batch=1), 16, 80, "fsdp2 both", "fsdp2"),
        (SMALL, 1, 40, "cache only", "one"),
        (SMALL, 2, 30, "cache only", "ddp"),
        (replace(RUN, checkpoint_blocks=4, micro_batch=1), 2, 100, "cache only", "fsdp2"),
        (SMALL, 2, 8, None, None),
    ],
)
def test_with_a_teacher(student: Needs, gpus: int, memory: int, strategy: str | None, layout: str | None) -> None:
    decision = decide(replace(student, teacher=BIG), gpus, memory * GB)
    assert (decision.strategy, decision.student) == (strategy, layout)


def test_a_cached_teacher_takes_nothing() -> None:
    with_teacher, without = decide(replace(SMALL, teacher=BIG), 1, 30 * GB), decide(SMALL, 1, 30 * GB)
    assert with_teacher.strategy == "cache only"
    assert with_teacher.bytes_of("cache only") == without.bytes_of("one")


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_the_table_adds_up_and_shows_where_the_bytes_come_from() -> None:
    decision = decide(RUN, 8, 80 * GB)
    assert decision.columns == ("ddp", "fsdp2")
    for column in range(2):
        assert sum(row.sizes[column] for row in decision.rows[:-1]) == decision.rows[-1].sizes[column]
    assert part(decision, "weights") == SEVEN.parameters * 4
    assert part(decision, "weights", 1) == SEVEN.parameters * 4 / 8
    assert part(decision, "optimizer", 1) == SEVEN.parameters
    assert next(row.arithmetic for row in decision.rows if row.what == "weights") == f"{SEVEN.parameters:,} × 4 B"
    assert next(row.arithmetic for row in decision.rows if row.what == "loss").startswith(
        "4 × 2,048 tokens × (50,257 × 4 B"
    )
    assert part(decision, "gathered", 0) == 0
    assert part(decision, "gathered", 1) == 8 * (SEVEN.rest_parameters + 2 * SEVEN.block_parameters)


def test_gradients_are_sharded_only_if_a_step_is_one_micro_batch() -> None:
    assert part(decide(RUN, 8, 80 * GB), "gradients", 1) == SEVEN.parameters * 4
    assert part(decide(RUN, 16, 80 * GB), "gradients", 1) == SEVEN.parameters * 4 / 16


def test_the_line_names_what_is_held_and_what_faster_ones_would_need() -> None:
    decision = decide(RUN, 64, 80 * GB)
    assert decision.why.startswith("fsdp2: ")
    assert "of 72.00 GB on each of 64 GPUs; ddp would need" in decision.why
    assert "\n" not in decision.why


# ---- wishes ----------------------------------------------------------------------------------------------------------


def test_a_wish_is_obeyed_where_it_fits_and_where_it_does_not() -> None:
    assert decide(SMALL, 8, 80 * GB, "fsdp2").strategy == "fsdp2"
    assert "as parallel.strategy says" in decide(SMALL, 8, 80 * GB, "fsdp2").why
    forced = decide(RUN, 8, 141 * GB, "ddp")
    assert (forced.strategy, forced.fits) == ("ddp", False)
    assert forced.remedies[0].change == "parallel.strategy=auto"
    assert decide(SMALL, 1, 80 * GB, "ddp").strategy == "one"


@pytest.mark.parametrize(
    "gpus, memory, message", [(0, GB, "gpus: expected at least 1"), (1, 0, "gpu memory: expected")]
)
def test_what_is_not_positive_is_refused(gpus: int, memory: int, message: str) -> None:
    with pytest.raises(GramianError, match=message):
        decide(SMALL, gpus, memory)


# ---- remedies --------------------------------------------------------------------------------------------------------


def test_a_refusal_says_exactly_what_would_fit() -> None:
    decision = decide(RUN, 8, 80 * GB)
    assert not decision.fits
    changes = [remedy.change for remedy in decision.remedies]
    assert changes == ["data.micro_batch=1", "parallel.checkpoint_blocks=3", "16 GPUs", "GPUs of 113 GB"]
    assert all(change in decision.why for change in changes)
    # One more is too many, one less too few.
    assert not decide(replace(RUN, micro_batch=2), 8, 80 * GB).fits
    assert not decide(RUN, 15, 80 * GB).fits
    assert not decide(RUN, 8, 112 * GB).fits


def test_several_changes_are_proposed_where_no_single_one_helps() -> None:
    changes = [remedy.change for remedy in decide(replace(SMALL, micro_batch=64), 1, 4 * GB).remedies]
    assert changes[0].startswith("data.micro_batch=")
    assert "with parallel.checkpoint_blocks=" in changes[0]
    alone = [remedy.change for remedy in decide(RUN, 1, 24 * GB).remedies]
    assert alone[0].endswith("GPUs with data.micro_batch=1 and parallel.checkpoint_blocks=2")


def test_models_that_recompute_block_by_block_are_told_so() -> None:
    single = replace(RUN, shape=replace(SEVEN, whole_segments=False))
    assert "parallel.checkpoint_blocks=1" in [remedy.change for remedy in decide(single, 8, 80 * GB).remedies]


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 48), st.sampled_from([257, 50257]), st.sampled_from(["bf16", "fp32", "fp64"]),
    st.integers(1, 128), st.integers(0, 16), st.integers(0, 6), st.integers(1, 64), st.floats(0.1, 200),
    st.sampled_from(["auto", "auto", "ddp", "fsdp2"]), st.booleans(),
)  # fmt: skip
def test_every_decision_keeps_its_word(
    layers: int, heads: int, vocabulary: int, kind: Kind, batch: int, micro: int, blocks: int, gpus: int,
    memory: float, wish: str, taught: bool,
) -> None:  # fmt: skip
    """What is chosen fits and nothing faster does; every remedy, taken, fits."""
    shape = gpt(vocabulary, 512, layers, 64 * heads, heads)
    needs = Needs(shape, kind, 512, batch, micro, blocks, teacher=BIG if taught else None)
    decision = decide(needs, gpus, int(memory * GB), wish)  # type: ignore[arg-type]
    assert decision.usable == int(USABLE * int(memory * GB))
    if decision.fits:
        assert decision.strategy is not None
        chosen = decision.columns.index(decision.strategy)
        assert decision.rows[-1].sizes[chosen] <= decision.usable
        assert all(size > decision.usable for size in decision.rows[-1].sizes[:chosen])
        assert decision.remedies == ()
        return
    assert all(size > decision.usable for size in decision.rows[-1].sizes)
    assert decision.remedies
    for remedy in decision.remedies:
        taken = decide(remedy.needs, remedy.gpus, remedy.gpu_memory, remedy.wish)
        assert taken.fits, remedy.change
        assert remedy.size <= taken.usable
