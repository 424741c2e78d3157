"""Captures under DDP, and where both take the same test FSDP2, against the single-process loop over the same samples."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gramian
from tests.dist import bodies
from tests.dist.worlds import (
    CASE_NAMES,
    WAYS,
    assert_same_bits,
    captured,
    gradients,
    mine,
    plain_gradients,
    whole,
    wrap,
)
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.oracles import sample_statistics
from tests.statistics.problems import assert_noise, assert_norms, assert_tensors, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]
ways = pytest.mark.parametrize("way", ["ddp", "fsdp2"])
all_ways = pytest.mark.parametrize("way", WAYS)

UNEVEN = [(3, 2), (1, 4), (5, 5)]
EMPTY = [(4, 0), (0, 3)]
ACCEPTS_EMPTY = [name for name in CASE_NAMES if name != "hf_llama"]
MATRIX = [
    *itertools.product(CASE_NAMES, UNEVEN, ("mean", "sum"), (torch.float64, torch.float32)),
    *itertools.product(ACCEPTS_EMPTY, EMPTY, ("mean", "sum"), (torch.float64,)),
]


@pytest.mark.parametrize("name, sizes, reduction, dtype", sample(MATRIX, 10))
@distributed(world_size=2)
def test_norms_are_each_ranks_own_and_gradients_are_untouched(
    rank: int, name: str, sizes: tuple[int, ...], reduction: str, dtype: torch.dtype
) -> None:
    bodies.own_norms(rank, "ddp", name, sizes, reduction, dtype)


@pytest.mark.parametrize("sizes", EMPTY)
@pytest.mark.parametrize("name", sample(ACCEPTS_EMPTY, 2, case=lambda name: None))
@distributed(world_size=2)
def test_a_rank_without_samples_has_no_norms(rank: int, name: str, sizes: tuple[int, ...]) -> None:
    bodies.own_norms(rank, "ddp", name, sizes, "sum", torch.float64)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "tied_gpt"] if not FULL else CASE_NAMES)
@ways
@distributed(world_size=3)
def test_norms_of_three_ranks_are_their_own(rank: int, way: str, name: str) -> None:
    bodies.own_norms(rank, way, name, (2, 4, 1), "mean", torch.float64)


@pytest.mark.parametrize("name, sizes, reduction", sample([*itertools.product(CASE_NAMES, UNEVEN, ("mean", "sum"))], 8))
@distributed(world_size=2)
def test_sums_over_the_group_are_those_of_all_samples(
    rank: int, name: str, sizes: tuple[int, ...], reduction: str
) -> None:
    bodies.added_up(rank, "ddp", name, sizes, reduction)


@pytest.mark.parametrize("sizes", EMPTY)
@ways
@distributed(world_size=2)
def test_sums_over_a_group_with_an_empty_rank(rank: int, way: str, sizes: tuple[int, ...]) -> None:
    bodies.added_up(rank, way, "tied_gpt", sizes, "sum")
    bodies.added_up(rank, way, "mlp", sizes, "mean")


@pytest.mark.full
@ways
@distributed(world_size=3)
def test_sums_over_three_ranks(rank: int, way: str) -> None:
    bodies.added_up(rank, way, "gpt", (2, 3, 1), "mean")


@ways
@distributed(world_size=2)
def test_without_a_group_statistics_stay_on_their_rank(rank: int, way: str) -> None:
    """Without a process group every rank's statistics are those of its own samples."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    model, fisher, noise = wrap(way, p.model()), gramian.DiagonalFisher(), gramian.NoiseScale()
    with gramian.observe(model, fisher, noise) as seen:
        p.backward(model, p.rows(rows))
    assert_tensors(whole(seen[fisher]), p.fisher(rows), p.tolerance)
    assert_noise(seen[noise], p.noise(rows), rows.stop - rows.start, p.tolerance)


@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused"] if not FULL else CASE_NAMES)
@distributed(world_size=2)
def test_accumulation_with_no_sync(rank: int, name: str) -> None:
    bodies.accumulated(rank, "ddp", name)


@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "hf_llama"])
@distributed(world_size=2)
def test_checkpointed_blocks_count_once(rank: int, name: str) -> None:
    bodies.checkpoints(rank, "ddp", name)


@pytest.mark.parametrize("name", ["tied_gpt", "mlp"])
@ways
@distributed(world_size=2)
def test_names_have_no_wrapper_in_them(rank: int, way: str, name: str) -> None:
    """No wrapper shows in the names of coverage and results."""
    p = problem(name, 4)
    model, fisher, health = wrap(way, p.model()), gramian.DiagonalFisher(), gramian.Health()
    with gramian.observe(model, fisher, health) as seen:
        p.backward(model, p.rows(slice(2 * rank, 2 * rank + 2)))
    names = [key for key, _ in p.model().named_parameters()]
    assert list(seen.coverage) == names
    assert list(seen[fisher]) == names
    assert {key.rpartition(".")[0] for key in names} <= set(seen[health])


@pytest.mark.parametrize("alone", [0, 1])
@distributed(world_size=2)
def test_a_capture_on_one_rank_only_waits_for_nobody(rank: int, alone: int) -> None:
    bodies.one_rank_alone(rank, "ddp", "tied_gpt", alone)


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("name", ["gpt", "tied_gpt"])
@ways
@distributed(world_size=2)
def test_taps_may_come_before_the_wrapper(rank: int, way: str, name: str) -> None:
    p, rows = problem(name, 5), mine(rank, (3, 2))
    expected = plain_gradients(p, way, lambda model: p.backward(model, p.rows(rows)))
    bare = p.model()
    if way != "ddp":
        late, refused = p.model(), refusal("^model: was sharded inside a capture")
        with refused, gramian.per_sample_norms(late):
            p.backward(wrap(way, late), p.rows(rows))
    with gramian.per_sample_norms(bare, proof="auto" if way == "ddp" else "off") as norms:
        model = wrap(way, bare)
        p.backward(model, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_same_bits(gradients(model), expected)


@ways
@distributed(world_size=2)
def test_a_model_may_be_wrapped_between_two_captures(rank: int, way: str) -> None:
    """One capture of the bare model, one of the wrapped one, one again of the bare name for it."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    bare = p.model()
    before = captured(bare, p, p.rows(rows))
    bare.zero_grad()
    model = wrap(way, bare)
    after = captured(model, p, p.rows(rows))
    with gramian.per_sample_norms(bare) as again:
        p.backward(model, p.rows(rows))
    for norms in (before, after, again):
        assert_norms(norms.values, p.norms(rows), p.tolerance)


@all_ways
@distributed(world_size=2)
def test_training_with_captures_ends_where_training_without_them_does(rank: int, way: str) -> None:
    """Training goes on: three optimizer steps with captures end at the parameters of three steps without."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    ends = []
    for observed in (False, True):
        model = wrap(way, p.model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            if observed:
                captured(model, p, p.rows(rows))
            else:
                p.backward(model, p.rows(rows))
            optimizer.step()
        ends.append([q.detach().to_local() if hasattr(q, "to_local") else q.detach() for q in model.parameters()])
    assert_same_bits(ends[1], ends[0])


@pytest.mark.full
@pytest.mark.parametrize("order", [pytest.param("compiled inside", marks=pytest.mark.full), "compiled outside"])
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused"] if FULL else ["mlp"])
@distributed(world_size=2)
def test_compiled_models(rank: int, name: str, order: str) -> None:
    p, rows = problem(name, 5), mine(rank, (3, 2))
    torch.compiler.reset()
    if order == "compiled inside":
        model: nn.Module = wrap("ddp", torch.compile(p.model(), backend="aot_eager"))
    else:
        model = torch.compile(wrap("ddp", p.model()), backend="aot_eager")
    for _ in range(2):
        norms = captured(model, p, p.rows(rows))
        assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert list(norms.coverage) == [key for key, _ in p.model().named_parameters()]


@pytest.mark.full
@distributed(world_size=2)
def test_a_graph_that_dynamo_cuts_into_buckets(rank: int) -> None:
    # Six layers of 0.7 MB and buckets of 1 MB: the compiled forward is several graphs, and so is the backward.
    torch.compiler.reset()
    layers = [nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(6)]
    bare = nn.Sequential(*layers).double()
    x = torch.randn(5, 300, dtype=torch.float64)[mine(rank, (3, 2))]
    model = torch.compile(wrap("ddp", bare, bucket_cap_mb=1), backend="aot_eager")
    for _ in range(2):
        with gramian.per_sample_norms(model, "sum") as norms:
            model(x).square().sum().backward()
        expected = sample_statistics.per_sample_norms(bare, lambda model, x: model(x).square().sum(), (x,))
        assert_norms(norms.values, expected, 1e-9)


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}, {"broadcast_buffers": False}],
    ids=lambda options: next(iter(options)),
)
@distributed(world_size=2)
def test_options_of_ddp_change_nothing(rank: int, options: dict[str, object]) -> None:
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    plain, model = wrap("ddp", p.model(), **options), wrap("ddp", p.model(), **options)
    p.backward(plain, p.rows(rows))
    norms = captured(model, p, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_same_bits(gradients(model), gradients(plain))


@distributed(world_size=2)
def test_unused_parameters_are_found_as_without_a_capture(rank: int) -> None:
    p, rows = problem("unused", 5), mine(rank, (3, 2))
    model = wrap("ddp", p.model(), find_unused_parameters=True)
    fisher = gramian.DiagonalFisher()
    for _ in range(2):
        with gramian.per_sample_norms(model) as norms, gramian.observe(model, fisher) as seen:
            p.backward(model, p.rows(rows))
        assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert norms.coverage["spare.weight"].status == "unused"
    assert not seen[fisher]["spare.weight"].any()


@distributed(world_size=1)
def test_a_static_graph_is_refused_by_name(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)
    with refusal("static_graph=True"):
        gramian.per_sample_norms(model)


@distributed(world_size=2)
def test_the_audit_compares_gradients_of_this_rank_before_they_are_averaged(rank: int) -> None:
    # Ranks hold very different samples: an average over ranks could not pass for this rank's own gradient.
    p = problem("tied_gpt", 5)
    rows = mine(rank, (1, 4))
    model = wrap("ddp", p.model())
    with gramian.per_sample_norms(model, audit=True) as norms:
        p.backward(model, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)


@distributed(world_size=2)
def test_ranks_may_run_different_numbers_of_passes_when_nothing_wraps_them(rank: int) -> None:
    # Rank 1 sees nothing at all; entering and leaving is all that is collective.
    p = problem("gpt", 5)
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher, process_group=dist.group.WORLD) as seen:
        if rank == 0:
            for rows in (slice(0, 2), slice(2, 5)):
                p.backward(model, p.rows(rows))
            assert_tensors(seen[fisher], p.fisher(), p.tolerance)
    assert_tensors(seen[fisher], p.fisher(), p.tolerance)


@distributed(world_size=3)
def test_a_group_of_some_ranks_sums_over_these(rank: int) -> None:
    p, rows = problem("mlp", 6), mine(rank, (2, 1, 3))
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    model, fisher = p.model(), gramian.DiagonalFisher()
    with gramian.observe(model, fisher, process_group=groups[rank == 1]) as seen:
        p.backward(model, p.rows(rows))
    expected = p.fisher([0, 1, 3, 4, 5]) if rank != 1 else p.fisher([2])
    assert_tensors(seen[fisher], expected, p.tolerance)
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


@ways
@distributed(world_size=2)
def test_accumulation_over_ranks_leaves_gradients_that_were_there(rank: int, way: str) -> None:
    p, rows = problem("gpt", 5), mine(rank, (3, 2))

    def twice(model: nn.Module) -> None:
        p.backward(model, p.rows(rows))
        p.backward(model, p.rows(rows))

    expected = plain_gradients(p, way, twice)
    model = wrap(way, p.model())
    p.backward(model, p.rows(rows))
    norms = captured(model, p, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert_same_bits(gradients(model), expected)


def _same_at_any_world_size(rank: int, world_size: int, name: str, sizes: tuple[int, ...], reduction: str) -> None:
    bodies.same_at_any_world_size(rank, "ddp", name, sizes, reduction)


def random_sizes(seed: int, world_size: int, samples: int = 6) -> tuple[int, ...]:
    """A random uneven split, empty ranks allowed."""
    cuts = sorted(random.Random(f"{seed} {world_size}").choices(range(samples + 1), k=world_size - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["tied_gpt"] if not FULL else ["mlp", "gpt", "tied_gpt", "reused", "padded_embedding"])
@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_any_split_over_any_number_of_ranks_gives_the_statistics_of_all_samples(seed: int, name: str) -> None:
    for world_size in (1, 2, 3):
        sizes = random_sizes(seed, world_size)
        run_on_ranks(world_size, _same_at_any_world_size, name, sizes, ("mean", "sum")[seed % 2])
