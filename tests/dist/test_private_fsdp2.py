"""Private training under FSDP2 (`fully_shard` of every block and the root), against the loop over all ranks' samples."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import gramian
from tests.dist import private_bodies as bodies
from tests.dist import unknown_layers as layers
from tests.dist.bodies import Bypassed
from tests.dist.test_private import ACCEPTS_EMPTY, ALL_RUNS, CLIPPING, EMPTY, MATRIX_OF_THREE, RUNS, UNEVEN
from tests.dist.worlds import CASE_NAMES, each_block, mine, wrap
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.statistics.problems import assert_tensors, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]

SHARDED = ("fsdp2", "fsdp2 kept")
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MATRIX = [
    *itertools.product(CASE_NAMES, SHARDED, CLIPPING, UNEVEN, ("mean", "sum")),
    *itertools.product(ACCEPTS_EMPTY, SHARDED, CLIPPING, EMPTY, ("mean", "sum")),
]
ways = pytest.mark.parametrize("way", SHARDED)


# ---- one step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, way, clipping, sizes, reduction", sample(MATRIX, 14))
@distributed(world_size=2)
def test_gradient_shards_are_the_clipped_sum_of_all_ranks_and_a_step_moves_by_it(
    rank: int, name: str, way: str, clipping: str, sizes: tuple[int, ...], reduction: str
) -> None:
    bodies.one_step(rank, way, name, sizes, reduction, clipping)


@pytest.mark.full
@pytest.mark.parametrize("name, clipping, sizes, reduction", sample(MATRIX_OF_THREE, 5))
@distributed(world_size=3)
def test_a_step_of_three_ranks(rank: int, name: str, clipping: str, sizes: tuple[int, ...], reduction: str) -> None:
    bodies.one_step(rank, "fsdp2", name, sizes, reduction, clipping)


@pytest.mark.parametrize(
    "name, way, clipping",
    sample([*itertools.product(["tied_gpt", "gpt", "hf_llama"], SHARDED, CLIPPING)], 3, case=lambda item: None),
)
@distributed(world_size=2)
def test_checkpointed_blocks(rank: int, name: str, way: str, clipping: str) -> None:
    bodies.one_step(rank, way, name, (3, 1), "mean", clipping, checkpoint=True)


@pytest.mark.parametrize("clipping", CLIPPING)
@distributed(world_size=2)
def test_the_root_alone_may_be_sharded(rank: int, clipping: str) -> None:
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    private = bodies.make_private(p, fully_shard(p.model()), clipping=clipping)
    private.backward(rows, by_engine=True)
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@pytest.mark.parametrize("name", ["hf_gpt2", "unused", "lora", "conv2d"])
@distributed(world_size=2)
def test_models_with_unused_frozen_and_transposed_parameters(rank: int, name: str) -> None:
    p, rows = problem(name, 5), mine(rank, (2, 3))
    private = bodies.make_private(p, fully_shard(p.model()))
    private.backward(rows)
    private.optimizer.step()
    sums = bodies.clipped_sum(p, bodies.limit_of(p))
    frozen = {key: torch.zeros_like(q) for key, q in p.model().named_parameters() if not q.requires_grad}
    bodies.assert_moved(private.model, p, {key: (sums | frozen)[key] for key, _ in p.model().named_parameters()})
    private.engine.detach()


@pytest.mark.parametrize(
    "name, clipping", sample([*itertools.product(["mlp", "gpt", "padded_embedding"], CLIPPING)], 3)
)
@distributed(world_size=2)
def test_mixed_precision_of_the_shards_is_within_bfloat16(rank: int, name: str, clipping: str) -> None:
    sizes = (3, 2)
    # The loop runs on weights and inputs as bfloat16 rounds them.
    p, rows = problem(name, sum(sizes), torch.bfloat16), mine(rank, sizes)
    model = wrap("fsdp2", p.model().float(), mp_policy=BFLOAT16)
    start = bodies.parameters_of(model)
    private = bodies.make_private(p, model, clipping=clipping)
    private.backward(rows, by_engine=True)
    for q in model.parameters():
        assert isinstance(q.grad, DTensor) and q.grad.dtype == torch.float32
    got, want = bodies.gradients_of(model), bodies.clipped_sum(p, bodies.limit_of(p))
    size = sum(float(g.square().sum()) for g in want.values()) ** 0.5
    off = sum(float((got[key].double() - g).square().sum()) for key, g in want.items()) ** 0.5
    assert off < 3e-2 * size
    private.optimizer.step()
    assert_tensors(bodies.moved_by(model, start), {key: -g / bodies.EXPECTED_BATCH for key, g in got.items()}, 1e-4)
    bodies.assert_ranks_hold_the_same(bodies.parameters_of(model))
    private.engine.detach()


@distributed(world_size=2)
def test_a_clipped_gradient_in_mixed_precision_is_within_the_clip_norm(rank: int) -> None:
    p = problem("gpt", 4, torch.float32)
    limit = 0.1 * bodies.limit_of(p)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 3)):
        private = bodies.make_private(p, wrap("fsdp2", p.model(), mp_policy=BFLOAT16), max_grad_norm=limit)
        private.backward(rows if rank == 1 else slice(0, 0))
        size = sum(float(g.double().square().sum()) for g in bodies.gradients_of(private.model).values()) ** 0.5
        assert 0.9 * limit < size <= limit
        private.engine.detach()


@pytest.mark.full
@distributed(world_size=2)
def test_a_detached_model_trains_as_one_that_never_was_private(rank: int) -> None:
    bodies.as_without_an_engine(rank, "fsdp2")


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@distributed(world_size=2)
def test_adam_steps_on_shards_as_on_a_whole_model(rank: int, options: dict[str, bool]) -> None:
    p, rows = problem("tied_gpt", 6), slice(3 * rank, 3 * rank + 3)
    plain = p.model()
    reference = AdamW(plain.parameters(), lr=0.1, **options)
    for key, q in plain.named_parameters():
        q.grad = bodies.clipped_sum(p, bodies.limit_of(p))[key] / bodies.EXPECTED_BATCH
    reference.step()
    model = wrap("fsdp2", p.model())
    private = bodies.make_private(p, model, optimizer=AdamW(model.parameters(), lr=0.1, **options))
    private.backward(rows)
    private.optimizer.step()
    assert_tensors(bodies.parameters_of(model), bodies.parameters_of(plain), 1e-7)
    private.engine.detach()


# ---- layers without a formula ------------------------------------------------------------------------------------------

UNKNOWN = [
    (*pair, clipping, sizes, reduction, checkpoint)
    for pair, clipping, (sizes, reduction), checkpoint in itertools.product(
        layers.ACCEPTED, CLIPPING, [((3, 1), "mean"), ((0, 3), "sum")], (False, True)
    )
]


@pytest.mark.parametrize("kind, units, clipping, sizes, reduction, checkpoint", sample(UNKNOWN, len(layers.LAYERS)))
@distributed(world_size=2)
def test_steps_of_layers_without_a_formula(
    rank: int, kind: str, units: str, clipping: str, sizes: tuple[int, ...], reduction: str, checkpoint: bool
) -> None:
    layers.two_steps(rank, kind, units, sizes, reduction, clipping, checkpoint)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, units, sizes, checkpoint",
    sample([(*pair, *rest) for pair, *rest in itertools.product(layers.ACCEPTED, UNEVEN, (False, True))], 12),
)
@distributed(world_size=2)
def test_norms_of_layers_without_a_formula(
    rank: int, kind: str, units: str, sizes: tuple[int, ...], checkpoint: bool
) -> None:
    layers.own_norms(rank, kind, units, sizes, "mean", checkpoint)


@pytest.mark.parametrize("kind", layers.LAYERS if FULL else ["lstm", "raw block"])
@distributed(world_size=2)
def test_mixed_precision_of_layers_without_a_formula(rank: int, kind: str) -> None:
    p, rows = layers.layered(kind, 5, torch.bfloat16), mine(rank, (3, 2))
    units = "root" if kind == "raw root" else "blocks"
    model = layers.sharded(p.model().float(), units, mp_policy=BFLOAT16)
    private = bodies.make_private(p, model)
    private.backward(rows)
    got, want = bodies.gradients_of(model), layers.expected(p, bodies.limit_of(p))
    size = sum(float(g.square().sum()) for g in want.values()) ** 0.5
    off = sum(float((got[key].double() - g).square().sum()) for key, g in want.items()) ** 0.5
    assert off < 3e-2 * size
    private.engine.detach()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lstm", "attention", "raw"] if FULL else ["raw"])
@distributed(world_size=2)
def test_a_compiled_model_of_layers_without_a_formula(rank: int, kind: str) -> None:
    torch.compiler.reset()
    p, rows = layers.layered(kind, 5), mine(rank, (3, 2))
    private = bodies.make_private(p, torch.compile(layers.sharded(p.model(), "blocks"), backend="aot_eager"))
    private.backward(rows)
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@pytest.mark.parametrize("kind, units", sorted(layers.UNITS_BELOW))
@distributed(world_size=2)
def test_a_parameter_of_a_module_with_units_below_is_refused(rank: int, kind: str, units: str) -> None:
    p, name = layers.layered(kind, 4), {"raw block": r"blocks\.0 \(", "raw root": r"model \("}[kind]
    model = layers.sharded(p.model(), units)
    complaint = rf"^{name}.*fully_shard units below it \(.*expected its own parameters in a module apart"
    for pieces in (None, 1):
        with refusal(complaint):
            bodies.make_private(p, model, max_physical_batch=pieces)
    with refusal(complaint), gramian.per_sample_norms(model):
        pass


@distributed(world_size=2)
def test_attention_that_is_sharded_in_part_is_refused(rank: int) -> None:
    p = layers.layered("attention", 4)
    model = p.model()
    fully_shard(model.get_submodule("blocks.1.layer.out_proj"))
    with refusal(r"^blocks\.1\.layer .*\(out_proj\).*expected no fully_shard below it$"):
        bodies.make_private(p, fully_shard(model))


class Aside(nn.Module):
    """A unit that leaves a tensor on itself and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.PReLU(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.act(x)
        return self.linear(x)


class Outside(nn.Module):
    """Goes on with what a unit left, so that nothing gathers the unit's weights in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.head = nn.Linear(4, 4), fully_shard(Aside()), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.unit(self.first(x))
        return self.head(self.unit.left)


@distributed(world_size=2)
def test_a_tensor_that_leaves_its_unit_unseen_is_refused(rank: int) -> None:
    model = fully_shard(Outside())
    engine, _ = bodies.private_squares(model)
    with refusal(r"^unit\.act \(PReLU\) .*expected fully_shard with units that return"):
        model(torch.randn(3, 4)).square().sum().backward()
    assert all(q.grad is None for q in model.parameters())
    engine.detach()
    dist.barrier()


class Penalty(nn.Module):
    """Keeps a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.scale.square().sum()
        return x * self.scale


class Penalised(nn.Module):
    """A recurrent layer whose weight is looked at from outside, or which adds to the loss past its outputs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.scale = way, nn.GRU(4, 4, batch_first=True), Penalty()

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(self.layer(x[:, None])[0])
        return y + self.scale.kept if self.way == "past" else y @ self.layer.weight_ih_l0[:4]


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize(
    "way, complaint",
    [
        ("past", r"^scale\.scale: the taps explain a gradient"),
        ("around", r"^layer\.weight_ih_l0: the taps explain a gradient"),
    ],
)
@distributed(world_size=2)
def test_gradients_past_a_layer_without_a_formula_are_named(rank: int, way: str, complaint: str) -> None:
    model = Penalised(way)
    fully_shard(model.scale)
    engine, _ = bodies.private_squares(fully_shard(model))
    for _ in range(2):
        with refusal(complaint):
            model(torch.randn(3, 4)).square().sum().backward()
        assert all(q.grad is None for q in model.parameters())
    engine.detach()
    dist.barrier()


# ---- what stays on its rank, what all agree on -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied_gpt"] if not FULL else ACCEPTS_EMPTY)
@ways
@distributed(world_size=2)
def test_without_one_sample_the_sum_changes_by_the_clip_norm_and_no_factor_of_another_rank_changes(
    rank: int, way: str, name: str
) -> None:
    bodies.one_sample_less(rank, way, name, (3, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["gradient", "weight"])
@distributed(world_size=2)
def test_what_one_rank_changes_is_refused_by_all(rank: int, where: str, dtype: torch.dtype) -> None:
    bodies.changes_are_refused_together(rank, "fsdp2", dtype, where)


@pytest.mark.parametrize("kind, name", [(bodies.Bypassing, "second.weight"), (Bypassed, "kept.weight")])
@distributed(world_size=2)
def test_a_bypass_is_named(rank: int, kind: type[nn.Module], name: str) -> None:
    bodies.a_bypass_is_named(rank, fully_shard(kind()), name)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("audited", [False, True])
@distributed(world_size=2)
def test_a_bypass_after_clean_steps_is_named(rank: int, audited: bool, inside: bool) -> None:
    bodies.a_bypass_later_on(rank, "fsdp2", audited, inside)


@pytest.mark.parametrize("kind, name", [(bodies.Bypassing, "second.weight"), (Bypassed, "kept.weight")])
@distributed(world_size=2)
def test_a_bypass_in_a_compiled_model_is_named(rank: int, kind: type[nn.Module], name: str) -> None:
    torch.compiler.reset()
    bodies.a_bypass_is_named(rank, torch.compile(fully_shard(kind()), backend="aot_eager"), name)


def split() -> Toy:
    """One half sharded, the other not."""
    return Toy(lambda net, x: net.second(net.first(x)), first=nn.Linear(7, 9), second=nn.Linear(9, 5))


@distributed(world_size=2)
def test_a_model_that_is_sharded_in_part_is_refused(rank: int) -> None:
    model = split()
    fully_shard(model.first)
    with refusal("expected fully_shard on the root"):
        bodies.make_private(problem("mlp", 4, torch.float32), model)


# ---- noise, draws and runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied_gpt"] if not FULL else ACCEPTS_EMPTY)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.dist
def test_a_step_over_nothing_moves_by_the_noise_of_the_release(name: str, world: int) -> None:
    run_on_ranks(world, bodies.noise_alone, "fsdp2", name)


@pytest.mark.dist
def test_noise_of_different_shards_is_independent() -> None:
    first, second = (part.flatten().double() for part in run_on_ranks(2, bodies.noise_of_shards, "fsdp2"))
    count = first.numel()
    assert count == second.numel() == 120_000
    # 5 standard errors each: one run in about 400 000 fails by chance
    for part in (first, second):
        assert abs(float(part.mean())) < 5 / count**0.5
        assert abs(float(part.var()) - 1) < 5 * (2 / count) ** 0.5
    assert abs(float((first * second).mean())) < 5 / count**0.5
    assert abs(float((first.square() - 1).mul(second.square() - 1).mean())) < 5 * 2 / count**0.5
    assert not torch.equal(first, second) and int((first == second).sum()) < 5


@pytest.mark.dist
@pytest.mark.parametrize("name, pieces, clipping, rate", ALL_RUNS if FULL else RUNS[::2])
def test_private_training_ends_at_the_same_parameters_on_any_number_of_ranks(
    name: str, pieces: int | None, clipping: str, rate: float
) -> None:
    bodies.compare_runs("fsdp2", name, pieces, clipping, rate)


@pytest.mark.dist
@pytest.mark.parametrize("replay", [True, False])
def test_a_resumed_run_replays_its_releases_or_moves_past_them(tmp_path: Path, replay: bool) -> None:
    bodies.compare_resumed(2, "fsdp2", tmp_path, replay)


# ---- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("what", ["blocks", "root"])
@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "mlp", "padded_embedding"])
@distributed(world_size=2)
def test_compiled_models(rank: int, name: str, what: str) -> None:
    torch.compiler.reset()
    p, rows = problem(name, 5), mine(rank, (3, 2))
    if what == "blocks":
        model = wrap("fsdp2", each_block(p.model(), lambda block: torch.compile(block, backend="aot_eager")))
    else:
        model = torch.compile(wrap("fsdp2", p.model()), backend="aot_eager")
    private = bodies.make_private(p, model)
    private.backward(rows)
    private.optimizer.step()
    bodies.assert_moved(model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()


@distributed(world_size=2)
def test_processes_meet_in_the_group_that_the_model_is_sharded_over_not_in_that_of_an_equal_mesh(rank: int) -> None:
    """DTensor shares one mesh object between equal meshes; the group of the first may be destroyed, or have another timeout."""
    p = problem("mlp", 4)
    wrap("fsdp2", p.model())  # its mesh is the first
    group = dist.new_group()
    model = fully_shard(p.model(), mesh=DeviceMesh.from_group(group, "cpu"))
    private = bodies.make_private(p, model)
    assert private.engine._model is not None and private.engine._model.parallel.group is group
    assert all(q.device_mesh.get_group() is group for q in model.parameters())
    private.backward(slice(2 * rank, 2 * rank + 2))
    private.optimizer.step()
    bodies.assert_moved(model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("budget", [500, 1500])
@distributed(world_size=2)
def test_all_take_two_passes_if_one_process_must(rank: int, budget: int) -> None:
    """Each backward gathers weights from all; the plan of a small batch fits into one."""
    p, rows = problem("mlp", 7), mine(rank, (6, 1))
    private = bodies.make_private(p, wrap("fsdp2", p.model()), memory_budget=budget)
    private.backward(rows, by_engine=True)
    assert private.engine._model is not None and private.engine._model.clipping.plan is not None
    assert private.engine._model.clipping.plan.two_pass == (rank == 0 or budget == 500)
    private.optimizer.step()
    bodies.assert_moved(private.model, p, bodies.clipped_sum(p, bodies.limit_of(p)))
    private.engine.detach()
