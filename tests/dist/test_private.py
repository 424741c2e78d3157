"""Private training under DistributedDataParallel on gloo processes, against the loop over all ranks' samples."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import TensorDataset

import gramian
from gramian.privacy.sampling.private_loader import PrivateLoader
from tests.dist import private_bodies as bodies
from tests.dist.worlds import CASE_NAMES, mine, without_sync, wrap
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.statistics.problems import assert_norms, assert_tensors, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]
ways = pytest.mark.parametrize("way", ["ddp", "fsdp2"])

CLIPPING = ("auto", "bookkeeping", "keep", "two_pass")
ACCEPTS_EMPTY = [name for name in CASE_NAMES if name != "hf_llama"]
UNEVEN, EMPTY, THREE = [(3, 1), (2, 4)], [(4, 0), (0, 3)], [(2, 0, 3), (3, 1, 2)]
MATRIX = [
    *itertools.product(CASE_NAMES, CLIPPING, UNEVEN, ("mean", "sum")),
    *itertools.product(ACCEPTS_EMPTY, CLIPPING, EMPTY, ("mean", "sum")),
]
MATRIX_OF_THREE = [
    *itertools.product(ACCEPTS_EMPTY, CLIPPING, THREE, ("mean", "sum")),
    *itertools.product(["hf_llama"] if FULL else [], CLIPPING, THREE[1:], ("mean", "sum")),
]


# ---- one step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, clipping, sizes, reduction", sample(MATRIX, 12))
@distributed(world_size=2)
def test_a_step_moves_by_the_clipped_sum_of_all_ranks(
    rank: int, name: str, clipping: str, sizes: tuple[int, ...], reduction: str
) -> None:
    bodies.one_step(rank, "ddp", name, sizes, reduction, clipping)


@pytest.mark.parametrize("name, clipping, sizes, reduction", sample(MATRIX_OF_THREE, 5))
@distributed(world_size=3)
def test_a_step_of_three_ranks(rank: int, name: str, clipping: str, sizes: tuple[int, ...], reduction: str) -> None:
    bodies.one_step(rank, "ddp", name, sizes, reduction, clipping)


@pytest.mark.parametrize(
    "name, clipping", sample([*itertools.product(["tied_gpt", "gpt", "hf_llama"], CLIPPING)], 2, case=lambda item: None)
)
@distributed(world_size=2)
def test_checkpointed_blocks(rank: int, name: str, clipping: str) -> None:
    bodies.one_step(rank, "ddp", name, (3, 1), "mean", clipping, checkpoint=True)


@pytest.mark.parametrize(
    "wrapping",
    [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}],
    ids=lambda wrapping: next(iter(wrapping)),
)
@distributed(world_size=2)
def test_options_of_ddp_change_nothing(rank: int, wrapping: dict[str, object]) -> None:
    bodies.one_step(rank, "ddp", "tied_gpt", (3, 1), wrapping=wrapping)
    bodies.as_without_an_engine(rank, "ddp", **wrapping)


@pytest.mark.parametrize("name", ["unused", "lora", "conv2d"] if not FULL else ["unused", "lora", "conv2d", "hf_gpt2"])
@distributed(world_size=2)
def test_models_with_unused_frozen_and_oddly_laid_out_parameters(rank: int, name: str) -> None:
    p, rows = problem(name, 5), mine(rank, (2, 3))
    model = p.model().to(memory_format=torch.channels_last) if name == "conv2d" else p.model()
    private = bodies.make_private(p, wrap("ddp", model, find_unused_parameters=name == "unused"))
    private.backward(rows)
    private.optimizer.step()
    sums = bodies.clipped_sum(p, bodies.limit_of(p))
    frozen = {key: torch.zeros_like(q) for key, q in p.model().named_parameters() if not q.requires_grad}
    bodies.assert_moved(private.model, p, {key: (sums | frozen)[key] for key, _ in p.model().named_parameters()})
    for q in model.parameters():
        assert q.grad is None or q.grad.stride() == q.stride()
    private.engine.detach()


@pytest.mark.parametrize("name", ["reused"] if not FULL else ACCEPTS_EMPTY)
@ways
@distributed(world_size=2)
def test_backwards_before_a_step_add_up(rank: int, way: str, name: str) -> None:
    """Without Poisson sampling, backwards before a step add up; a step later the sum begins anew."""
    p, rows = problem(name, 7), mine(rank, (4, 3))
    private = bodies.make_private(p, wrap(way, p.model()))
    with without_sync(private.model):  # the usual way to accumulate; it changes nothing here
        private.backward(slice(rows.start, rows.start + 1))
    private.backward(slice(rows.start + 1, rows.stop))
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.optimizer.zero_grad()
    before = bodies.parameters_of(private.model)
    private.backward(slice(0, 0))
    private.optimizer.step()
    assert not any(step.any() for step in bodies.moved_by(private.model, before).values())
    private.engine.detach()


@distributed(world_size=2)
def test_processes_with_different_numbers_of_backwards_account_for_the_largest(rank: int) -> None:
    p = problem("mlp", 6)
    private = bodies.make_private(
        p, wrap("ddp", p.model()), noise_multiplier=1.0, batch_size=1, expected_batch=None, max_grad_norm=1.0
    )
    for row in range(1 + rank):
        private.backward(slice(row, row + 1))
    private.optimizer.step()
    alone = gramian.PrivacyEngine("rdp")
    alone._ledger.accounting.record(1.0, 2 * private.engine.sample_rate)
    alone._ledger.accounting.set_steps(1)
    assert private.engine.get_epsilon(1e-5) == alone.get_epsilon(1e-5)
    private.engine.detach()


@pytest.mark.parametrize("way, fused", [("ddp", False), ("ddp", True), ("fsdp2", False)])  # no fused SGD for DTensor
@distributed(world_size=2)
def test_a_scaled_loss(rank: int, way: str, fused: bool) -> None:
    """A GradScaler, which unscales local sums or shards, or leaves it to a fused optimizer."""
    p, rows = problem("mlp", 5), mine(rank, (3, 2))
    scaler, model = torch.amp.GradScaler("cpu", init_scale=512.0), wrap(way, p.model())
    private = bodies.make_private(p, model, loss_scale=scaler, optimizer=SGD(model.parameters(), lr=1.0, fused=fused))
    scaler.scale(p.case.loss(model, *p.rows(rows), reduction="mean")).backward()
    scaler.step(private.optimizer)
    scaler.update()
    bodies.assert_moved(model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@ways
@distributed(world_size=2)
def test_the_stopwatch_sees_the_reduction_of_every_parameter(rank: int, way: str) -> None:
    """The stopwatch sees the reductions, and changes nothing."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=bodies.SEED)
    engine.stopwatch.on = True
    private = bodies.make_private(p, wrap(way, p.model()), engine=engine)
    private.backward(rows)
    private.optimizer.step()
    reduced = {line["what"] for line in engine.stopwatch.report() if line["phase"] == "communication"}
    assert reduced == set(p.gradients)
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    engine.detach()


@ways
@distributed(world_size=2)
def test_independence_is_checked_on_every_rank(rank: int, way: str) -> None:
    bodies.independent(rank, way)


@ways
@distributed(world_size=2)
def test_norms_can_be_captured_beside(rank: int, way: str) -> None:
    """A capture of norms inside a private step sees this rank's own samples."""
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    private = bodies.make_private(p, wrap(way, p.model()))
    with gramian.per_sample_norms(private.model) as norms:
        private.backward(rows)
    assert_norms(norms.values, p.norms(rows), p.tolerance)
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


# ---- the reducer -------------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_the_reducer_is_off_while_private_and_on_again_afterwards(rank: int) -> None:
    p = problem("mlp", 4)
    model = wrap("ddp", p.model())
    assert isinstance(model, DistributedDataParallel)
    private = bodies.make_private(p, model)
    assert not model.require_backward_grad_sync
    with model.no_sync():
        private.backward(slice(2 * rank, 2 * rank + 2))
    assert not model.require_backward_grad_sync
    private.engine.detach()
    assert model.require_backward_grad_sync


@distributed(world_size=2)
def test_the_reducer_is_on_again_when_make_private_fails(rank: int) -> None:
    model = wrap("ddp", nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)))
    assert isinstance(model, DistributedDataParallel)
    p = problem("mlp", 4, torch.float32)
    try:
        private = bodies.make_private(p, model)
    except gramian.GramianError:
        pass
    else:  # refused in the first forward instead
        with refusal(r"^1 \(BatchNorm1d\)"):
            private.backward(slice(0, 2))
        private.engine.detach()
    assert model.require_backward_grad_sync


@pytest.mark.parametrize("compiled", [False, True])
@distributed(world_size=2)
def test_a_wrapper_around_the_wrapper_is_seen(rank: int, compiled: bool) -> None:
    # backend "eager": what counts is that the reduction is found under torch.compile's module
    torch.compiler.reset()
    p, rows = problem("mlp", 4), slice(2 * rank, 2 * rank + 2)
    inner = wrap("ddp", torch.compile(p.model(), backend="eager") if compiled else p.model())
    model = inner if compiled else torch.compile(inner, backend="eager")
    private = bodies.make_private(p, model, expected_batch=None, batch_size=1)
    assert private.engine.expected_batch == 2.0
    assert isinstance(inner, DistributedDataParallel) and not inner.require_backward_grad_sync
    private.backward(rows)
    assert_tensors(bodies.gradients_of(model), bodies.clipped_sum(p, bodies.limit_of(p), rows), p.tolerance)
    private.optimizer.step()
    bodies.assert_ranks_hold_the_same(bodies.parameters_of(model))
    private.engine.detach()
    assert inner.require_backward_grad_sync


@distributed(world_size=1)
def test_a_static_graph_is_refused_by_name(rank: int) -> None:
    model = DistributedDataParallel(problem("mlp", 4).model(), static_graph=True)
    with refusal("static_graph=True"):
        bodies.make_private(problem("mlp", 4), model)
    assert model.require_backward_grad_sync


# ---- batches of one sample ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["keep", "auto"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@distributed(world_size=2)
def test_whole_gradients_of_single_samples_stay_local_until_the_step(
    rank: int, clipping: str, options: dict[str, object]
) -> None:
    p = problem("tied_gpt", 4)
    rows = [slice(0, 1), slice(1, 2), slice(2, 3)] if rank == 0 else [slice(3, 4), slice(0, 0), slice(0, 0)]
    model = wrap("ddp", p.model(), **options)
    p.backward(model, p.rows(slice(0, 1)))  # the reducer has worked before
    model.zero_grad()
    private = bodies.make_private(p, model, clipping=clipping, max_physical_batch=1)
    for part in rows:
        private.backward(part)
    own = slice(0, 3) if rank == 0 else slice(3, 4)
    assert_tensors(bodies.gradients_of(model), bodies.clipped_sum(p, bodies.limit_of(p), own), p.tolerance)
    private.optimizer.step()
    bodies.assert_moved(model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()
    bodies.as_without_an_engine(rank, "ddp", **options)


@distributed(world_size=2)
def test_a_bypass_is_named(rank: int) -> None:
    bodies.a_bypass_is_named(rank, wrap("ddp", bodies.Bypassing()), "second.weight")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("audited", [False, True])
@distributed(world_size=2)
def test_a_bypass_after_clean_steps_is_named(rank: int, audited: bool, inside: bool) -> None:
    bodies.a_bypass_later_on(rank, "ddp", audited, inside)


@distributed(world_size=2)
def test_a_bypass_is_clipped_where_batches_are_single_samples(rank: int) -> None:
    model = wrap("ddp", bodies.Bypassing().double())
    start = bodies.parameters_of(model)
    x = torch.randn(2, 4, dtype=torch.float64)
    engine, optimizer = bodies.private_squares(model, max_physical_batch=1, expected_batch=2.0)
    model(x[rank : rank + 1]).square().sum().backward()
    assert engine.last is not None
    plain = bodies.Bypassing().double()
    plain.load_state_dict(start)
    plain(x[rank : rank + 1]).square().sum().backward()
    own = torch.cat([q.grad.flatten() for q in plain.parameters() if q.grad is not None])
    assert_norms(engine.last.norms_B, own.norm()[None], 1e-9)
    optimizer.step()
    moved = bodies.moved_by(model, start)
    assert 0 < sum(float(step.square().sum()) for step in moved.values()) ** 0.5 <= 1e-3 * (1 + 1e-12)
    bodies.assert_ranks_hold_the_same(bodies.parameters_of(model))
    engine.detach()


# ---- what stays on its rank, what all agree on -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "tied_gpt"] if not FULL else ACCEPTS_EMPTY)
@distributed(world_size=2)
def test_without_one_sample_the_sum_changes_by_the_clip_norm_and_no_factor_of_another_rank_changes(
    rank: int, name: str
) -> None:
    bodies.one_sample_less(rank, "ddp", name, (3, 2))


@ways
@distributed(world_size=3)
def test_the_last_sample_of_a_rank_leaves(rank: int, way: str) -> None:
    bodies.one_sample_less(rank, way, "reused", (2, 1, 3))


@ways
@distributed(world_size=2)
def test_a_sample_that_is_not_finite_counts_nothing(rank: int, way: str) -> None:
    """A sample that is not finite on rank 1 counts nothing there, and nothing elsewhere notices."""
    p, rows = problem("mlp", 6), mine(rank, (3, 3))
    private = bodies.make_private(p, wrap(way, p.model()))
    x, y = p.rows(rows)
    if rank == 1:
        x = x.clone()
        x[1] = torch.nan
    private.backward((x, y))
    assert private.engine.nonfinite == rank
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p), [0, 1, 2, 3, 5]))
    private.engine.detach()


@ways
@distributed(world_size=2)
def test_a_layer_that_one_rank_does_not_use(rank: int, way: str) -> None:
    bodies.unused_on_one_rank(rank, way)


@pytest.mark.parametrize("kind", ["length", "records"])
@ways
@distributed(world_size=2)
def test_data_sets_that_differ_between_ranks_are_refused(rank: int, way: str, kind: str) -> None:
    """One more record, or another record, on one rank: refused on all of them."""
    p = problem("mlp", 6)
    x, y = p.batch
    if rank == 1:
        x, y = (x[:-1], y[:-1]) if kind == "length" else (x + 1, y)
    model = wrap(way, p.model())
    with refusal("is not the same on every process"):
        bodies.make_private(p, model, data=TensorDataset(x, y), poisson_sampling=True)
    private = bodies.make_private(p, model, poisson_sampling=True)  # nothing was installed
    private.engine.detach()


OPTIONS = [
    ("expected_batch", (3.0, 4.0)), ("max_grad_norm", (1.0, 2.0)), ("noise_multiplier", (1.0, 1.5)),
    ("max_physical_batch", (None, 1)), ("batch_size", (1, 2)),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("option, values", OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_ranks_with_different_options_are_refused(option: str, values: tuple[object, ...]) -> None:
    options = {"expected_batch": None} if option == "batch_size" else {}
    assert all(run_on_ranks(2, bodies.different_options, "ddp", option, values, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@distributed(world_size=2)
def test_a_rank_without_a_gradient_adds_zeros_of_the_same_layout_and_dtype(rank: int, dtype: torch.dtype) -> None:
    """A rank that has no gradient of a parameter adds zeros of the same layout and dtype as the others' sums."""
    torch.manual_seed(0)
    bare = bodies.Transposed().to(dtype)
    assert not bare.extra.weight.is_contiguous()
    start = {name: q.detach().clone() for name, q in bare.named_parameters()}
    bare.skips = rank == 1
    model = DistributedDataParallel(bare)
    engine, optimizer = bodies.private_squares(model, max_grad_norm=1e6, expected_batch=1.0)
    x = torch.randn(3, 4, dtype=dtype)
    model(x[:2] if rank == 0 else x[2:]).square().sum().backward()
    optimizer.step()
    alone = bodies.Transposed().to(dtype)
    alone.load_state_dict(start)
    for part, skips in ((x[:2], False), (x[2:], True)):
        alone.skips = skips
        alone(part).square().sum().backward()
    expected = {name: -q.grad for name, q in alone.named_parameters() if q.grad is not None}
    assert_tensors(bodies.moved_by(model, start), expected, 3e-2 if dtype == torch.bfloat16 else 1e-9)
    bodies.assert_ranks_hold_the_same({name: q.contiguous() for name, q in bodies.parameters_of(model).items()})
    engine.detach()


@distributed(world_size=2)
def test_detach_gives_the_users_own_wrapper_back(rank: int) -> None:
    model = wrap("ddp", problem("mlp", 4).model())
    assert bodies.make_private(problem("mlp", 4), model).engine.detach() is model


@ways
@distributed(world_size=2)
def test_all_ranks_take_the_key_of_the_first(rank: int, way: str) -> None:
    """Keys of the operating system differ between processes until a wrapped model is made private."""
    p = problem("mlp", 6)
    private = bodies.make_private(p, wrap(way, p.model()), seed=None, poisson_sampling=True)
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, bytes(private.engine.state_dict()["secrets"]["key"].tolist()))
    assert len(set(keys)) == 1
    assert isinstance(private.loader, PrivateLoader)
    private.engine.detach()


@ways
@distributed(world_size=3)
def test_the_expected_batch_counts_all_ranks(rank: int, world_size: int, way: str) -> None:
    """expected_batch = batch_size × ranks, sample_rate = that over the whole data set."""
    p = problem("mlp", 12)
    private = bodies.make_private(p, wrap(way, p.model()), expected_batch=None, batch_size=2, poisson_sampling=True)
    assert private.engine.expected_batch == 2.0 * world_size
    assert private.engine.sample_rate == 2 * world_size / 12
    assert len(private.loader) == round(12 / (2 * world_size))
    private.engine.detach()


@distributed(world_size=2)
def test_a_model_that_nobody_wrapped_is_one_process(rank: int) -> None:
    """Nobody wrapped it: each process is told that it trains its own model, with its own batch, noise and key."""
    p = problem("mlp", 6)
    with warnings.catch_warnings(record=True) as told:
        private = bodies.make_private(p, p.model(), seed=None, expected_batch=None, batch_size=2, quiet=False)
    assert any("module: is not wrapped although there are several processes" in str(w.message) for w in told)
    assert private.engine.expected_batch == 2.0
    assert private.engine.sample_rate == 2 / 6
    rows = slice(3 * rank, 3 * rank + 2 + rank)
    private.backward(rows)
    private.optimizer.step()
    expected = {name: -total / 2.0 for name, total in bodies.clipped_sum(p, bodies.limit_of(p), rows).items()}
    assert_tensors(bodies.moved_by(private.model, bodies.parameters_of(p.model())), expected, p.tolerance)
    private.engine.detach()
    keys: list[Any] = [None, None]
    dist.all_gather_object(keys, bytes(private.engine.state_dict()["secrets"]["key"].tolist()))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["gradient", "weight"])
@distributed(world_size=2)
def test_what_one_rank_changes_is_refused_by_all(rank: int, where: str, dtype: torch.dtype) -> None:
    bodies.changes_are_refused_together(rank, "ddp", dtype, where)


@distributed(world_size=3)
def test_a_group_of_some_ranks_sums_over_these(rank: int) -> None:
    """DDP over ranks 0 and 2 of three: expected batch, key, pieces and sums are those of the two."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[rank == 1]
    p, rows = problem("mlp", 6), {0: slice(0, 3), 1: slice(0, 6), 2: slice(3, 6)}[rank]
    model = DistributedDataParallel(p.model(), process_group=group)
    private = bodies.make_private(p, model, expected_batch=None, batch_size=3 if rank != 1 else 6, seed=None)
    assert private.engine.expected_batch == 6.0
    private.backward(rows)
    private.optimizer.step()
    expected = {name: -total / 6.0 for name, total in bodies.clipped_sum(p, bodies.limit_of(p)).items()}
    assert_tensors(bodies.moved_by(model, bodies.parameters_of(p.model())), expected, p.tolerance)
    keys: list[Any] = [None] * 3
    dist.all_gather_object(keys, bytes(private.engine.state_dict()["secrets"]["key"].tolist()))
    assert keys[0] == keys[2] != keys[1]
    private.engine.detach()
    dist.barrier()
    for one in groups:
        if dist.get_rank(one) >= 0:
            dist.destroy_process_group(one)


# ---- noise, draws and runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied_gpt"] if not FULL else ACCEPTS_EMPTY)
@distributed(world_size=2)
def test_a_step_over_nothing_moves_by_the_noise_of_the_release(rank: int, world_size: int, name: str) -> None:
    bodies.noise_alone(rank, world_size, "ddp", name)


@pytest.mark.dist
def test_every_rank_adds_the_same_noise_once() -> None:
    first, second = run_on_ranks(2, bodies.noise_of_shards, "ddp")
    assert torch.equal(first, second)
    # 240 000 normal numbers: 5 standard errors, one run in 1.7 million fails by chance
    assert abs(float(first.std()) - 1) < 5 / (2 * first.numel()) ** 0.5


RUNS = [
    ("tied_gpt", None, "auto", 0.5), ("mlp", 2, "bookkeeping", 0.5), ("reused", 3, "two_pass", 0.5),
    ("padded_embedding", 1, "keep", 0.5), ("mlp", None, "auto", 0.1),
]  # fmt: skip
ALL_RUNS = [*itertools.product(ACCEPTS_EMPTY, [None, 1, 3], CLIPPING, [0.5, 0.1])]


@pytest.mark.dist
@pytest.mark.parametrize("name, pieces, clipping, rate", ALL_RUNS if FULL else RUNS)
def test_private_training_ends_at_the_same_parameters_on_any_number_of_ranks(
    name: str, pieces: int | None, clipping: str, rate: float
) -> None:
    bodies.compare_runs("ddp", name, pieces, clipping, rate)


ADAPTIVE: dict[str, Any] = {"clip_function": "adaptive", "noise_multiplier": 0.2}


@pytest.mark.dist
@pytest.mark.parametrize("options", [ADAPTIVE, pytest.param({"clip_function": "per_layer"}, marks=pytest.mark.full)])
def test_clipping_functions_end_at_the_same_parameters_and_clip_norm_on_any_number_of_ranks(
    options: dict[str, Any],
) -> None:
    bodies.compare_runs("ddp", "mlp", 2, "auto", 0.5, options)


@pytest.mark.dist
@ways
def test_no_rank_replays_on_other_weights(tmp_path: Path, way: str) -> None:
    bodies.compare_resumed(2, way, tmp_path, True, other_weights=True)


@pytest.mark.dist
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("seed", [None, bodies.SEED])
def test_a_resumed_run_replays_its_releases_or_moves_past_them(tmp_path: Path, replay: bool, seed: int | None) -> None:
    bodies.compare_resumed(2, "ddp", tmp_path, replay, seed)


@pytest.mark.dist
def test_all_ranks_count_as_the_first_does() -> None:
    (steps, ended), (steps_of_second, ended_of_second) = run_on_ranks(2, bodies.counted_before, "ddp")
    assert steps == steps_of_second == 3
    assert all(torch.equal(ended[key], ended_of_second[key]) for key in ended)


# ---- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["compiled inside", pytest.param("compiled outside", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused"] if FULL else ["mlp"])
@distributed(world_size=2)
def test_compiled_models(rank: int, name: str, order: str) -> None:
    torch.compiler.reset()
    p, rows = problem(name, 5), mine(rank, (3, 2))
    if order == "compiled inside":
        model: nn.Module = wrap("ddp", torch.compile(p.model(), backend="aot_eager"))
    else:
        model = torch.compile(wrap("ddp", p.model()), backend="aot_eager")
    private = bodies.make_private(p, model)
    private.backward(rows)
    private.optimizer.step()
    bodies.assert_moved(model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()
