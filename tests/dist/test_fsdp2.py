"""Captures under FSDP2 (`fully_shard` of every block and the root), against the loop over the same samples."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gramian
from gramian.parallel import lockstep
from tests.dist import bodies
from tests.dist.test_captures import ACCEPTS_EMPTY, EMPTY, UNEVEN, random_sizes
from tests.dist.worlds import CASE_NAMES, captured, each_block, mine, wrap
from tests.kit.matrix import FULL, sample
from tests.kit.processes import distributed, run_on_ranks
from tests.kit.refusals import refusal
from tests.statistics.problems import assert_norms, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]

SHARDED = ("fsdp2", "fsdp2 kept")
MATRIX = [
    *itertools.product(CASE_NAMES, SHARDED, UNEVEN, ("mean", "sum"), (torch.float64, torch.float32)),
    *itertools.product(ACCEPTS_EMPTY, SHARDED, EMPTY, ("mean", "sum"), (torch.float64,)),
]
ways = pytest.mark.parametrize("way", SHARDED)


@pytest.mark.parametrize("name, way, sizes, reduction, dtype", sample(MATRIX, 12))
@distributed(world_size=2)
def test_norms_are_each_ranks_own_and_gradient_shards_are_untouched(
    rank: int, name: str, way: str, sizes: tuple[int, ...], reduction: str, dtype: torch.dtype
) -> None:
    bodies.own_norms(rank, way, name, sizes, reduction, dtype)


@pytest.mark.parametrize("sizes", EMPTY)
@pytest.mark.parametrize("name", sample(ACCEPTS_EMPTY, 2, case=lambda name: None))
@ways
@distributed(world_size=2)
def test_a_rank_without_samples_has_no_norms(rank: int, way: str, name: str, sizes: tuple[int, ...]) -> None:
    bodies.own_norms(rank, way, name, sizes, "sum", torch.float64)


@pytest.mark.parametrize(
    "name, way, sizes, reduction", sample([*itertools.product(CASE_NAMES, SHARDED, UNEVEN, ("mean", "sum"))], 10)
)
@distributed(world_size=2)
def test_sums_over_the_group_are_those_of_all_samples(
    rank: int, name: str, way: str, sizes: tuple[int, ...], reduction: str
) -> None:
    bodies.added_up(rank, way, name, sizes, reduction)


@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
@distributed(world_size=2)
def test_results_per_parameter_are_placed_like_gradients(rank: int, way: str) -> None:
    """Results per parameter live where the parameter's gradient lives, once they are the same on every rank."""
    p, rows, fisher = problem("tied_gpt", sum((3, 2))), mine(rank, (3, 2)), gramian.DiagonalFisher()
    model = wrap(way, p.model())
    with gramian.observe(model, fisher, process_group=dist.group.WORLD) as seen:
        p.backward(model, p.rows(rows))
    gradients = {key.removeprefix("module."): q.grad for key, q in model.named_parameters()}
    for key, value in seen[fisher].items():
        assert isinstance(value, DTensor) == isinstance(gradients[key], DTensor)
        if isinstance(value, DTensor):
            assert value.placements == gradients[key].placements and value.device_mesh == gradients[key].device_mesh


@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused"] if not FULL else CASE_NAMES)
@ways
@distributed(world_size=2)
def test_accumulation_without_gradient_sync(rank: int, way: str, name: str) -> None:
    bodies.accumulated(rank, way, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "hf_llama"])
@ways
@distributed(world_size=2)
def test_checkpointed_blocks_count_once(rank: int, way: str, name: str) -> None:
    bodies.checkpoints(rank, way, name)


@pytest.mark.parametrize("alone", [0, 1])
@ways
@distributed(world_size=2)
def test_a_capture_on_one_rank_only_waits_for_nobody(rank: int, way: str, alone: int) -> None:
    bodies.one_rank_alone(rank, way, "tied_gpt", alone)


def _compiled(model: nn.Module, what: str) -> nn.Module:
    torch.compiler.reset()
    if what == "blocks":
        return wrap("fsdp2", each_block(model, lambda block: torch.compile(block, backend="aot_eager")))
    return torch.compile(wrap("fsdp2", model), backend="aot_eager")


@pytest.mark.full
@pytest.mark.parametrize("what", [pytest.param("blocks", marks=pytest.mark.full), "root"])
@pytest.mark.parametrize("name", ["gpt", "tied_gpt", "mlp", "padded_embedding"] if FULL else ["mlp"])
@distributed(world_size=2)
def test_compiled_models(rank: int, name: str, what: str) -> None:
    p, rows = problem(name, 5), mine(rank, (3, 2))
    model = _compiled(p.model(), what)
    for _ in range(2):
        norms = captured(model, p, p.rows(rows))
        assert_norms(norms.values, p.norms(rows), p.tolerance)
    assert list(norms.coverage) == [key for key, _ in p.model().named_parameters()]


@pytest.mark.full
@distributed(world_size=2)
def test_a_reused_module_compiled_by_itself_is_refused_by_name_or_right(rank: int) -> None:
    p, rows = problem("reused", 5), mine(rank, (3, 2))
    model = _compiled(p.model(), "blocks")
    try:
        norms = captured(model, p, p.rows(rows))
    except gramian.GramianError as error:
        assert str(error).startswith("shared.")
    else:
        assert_norms(norms.values, p.norms(rows), p.tolerance)


@distributed(world_size=2)
def test_the_root_alone_may_be_sharded(rank: int) -> None:
    p, rows = problem("tied_gpt", 5), mine(rank, (3, 2))
    model = fully_shard(p.model())
    norms = captured(model, p, p.rows(rows))
    assert_norms(norms.values, p.norms(rows), p.tolerance)


@distributed(world_size=2)
def test_weights_that_are_zero_and_stay_whole_after_a_backward_are_the_users(rank: int) -> None:
    p, rows = problem("mlp", 5), mine(rank, (3, 2))
    losses = []
    for observed in (False, True):
        torch.manual_seed(0)
        whole = p.model()
        nn.init.zeros_(next(q for q in whole.parameters() if q.dim() > 1))
        model = wrap("fsdp2", whole)
        model.set_reshard_after_backward(False)
        for _ in range(2):
            with gramian.per_sample_norms(model) if observed else torch.enable_grad():
                loss = p.case.loss(model, *p.rows(rows), reduction="mean")
                loss.backward()
            losses.append(float(loss))
    assert len(set(losses)) == 1


@pytest.mark.parametrize("name", ["mlp", "padded_embedding", "gpt"])
@distributed(world_size=2)
def test_mixed_precision_of_the_shards_is_within_bfloat16(rank: int, name: str) -> None:
    p, rows = problem(name, 5, torch.float32), mine(rank, (3, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap("fsdp2", p.model(), mp_policy=policy)
    norms = captured(model, p, p.rows(rows))
    assert norms.values.dtype == torch.float32
    torch.testing.assert_close(norms.values.double(), p.norms(rows), rtol=5e-2, atol=0)


@distributed(world_size=2)
def test_frozen_shards_are_left_alone(rank: int) -> None:
    p, rows = problem("gpt", 5), mine(rank, (3, 2))
    model = p.model()
    for key, q in model.named_parameters():
        q.requires_grad_(not key.startswith("blocks.0"))
    model = wrap("fsdp2", model)
    norms = captured(model, p, p.rows(rows))
    kept = [g[rows].flatten(1) for key, g in p.gradients.items() if not key.startswith("blocks.0")]
    assert_norms(norms.values, torch.cat(kept, 1).norm(dim=1), p.tolerance)


@ways
@distributed(world_size=2)
def test_a_layer_without_a_formula_runs_again_on_whole_weights(rank: int, way: str) -> None:
    bodies.own_norms(rank, way, "mha", (3, 1), "mean", torch.float64)


@distributed(world_size=2)
def test_a_layer_without_a_formula_is_refused_by_name_where_its_weights_stay_sharded(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4))
    mesh = dist.init_device_mesh("cpu", (2,))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
    with (
        refusal("^1.weight is tensor parallel, which only K-FAC .*expected whole layers"),
        gramian.per_sample_norms(model),
    ):
        model(torch.randn(3, 4))


@distributed(world_size=2)
def test_sharded_parameters_keep_their_placement(rank: int) -> None:
    p = problem("tied_gpt", 4)
    model = wrap("fsdp2", p.model())
    before = {key: (q.placements, q.to_local().clone()) for key, q in model.named_parameters()}
    captured(model, p, p.rows(slice(2 * rank, 2 * rank + 2)))
    for key, q in model.named_parameters():
        assert isinstance(q, DTensor)
        assert isinstance(q.grad, DTensor)
        assert q.placements == q.grad.placements == before[key][0]
        assert torch.equal(q.to_local(), before[key][1])


class _Outside(nn.Module):
    """The second layer's weight is read behind its back once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.outside = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x))
        return nn.functional.linear(h, self.second.weight) if self.outside else h


@distributed(world_size=2)
def test_the_weight_behind_a_layers_back_is_noticed_when_sharded(rank: int) -> None:
    model = fully_shard(_Outside())
    with refusal(r"^second\.weight: the taps explain"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()
    dist.barrier()


@pytest.mark.full
@distributed(world_size=2)
def test_an_eager_capture_after_a_compiled_one_is_audited(rank: int) -> None:
    bare = _Outside()
    bare.outside = False
    model = fully_shard(bare)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with gramian.per_sample_norms(compiled, "sum"):
        compiled(torch.randn(3, 4)).square().sum().backward()
    bare.outside = True
    with refusal(r"^second\.weight: the taps explain"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()
    dist.barrier()


def _same_at_any_world_size(rank: int, world_size: int, name: str, sizes: tuple[int, ...], reduction: str) -> None:
    bodies.same_at_any_world_size(rank, "fsdp2", name, sizes, reduction)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("name", ["tied_gpt"] if not FULL else ["mlp", "gpt", "tied_gpt", "reused", "padded_embedding"])
@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_any_split_over_any_number_of_ranks_gives_the_statistics_of_all_samples(seed: int, name: str) -> None:
    for world_size in (1, 2, 3):
        sizes = random_sizes(seed + 100, world_size)
        run_on_ranks(world_size, _same_at_any_world_size, name, sizes, ("mean", "sum")[seed % 2])


@distributed(world_size=2)
def test_a_weight_that_is_never_used_through_its_layer_is_named(rank: int) -> None:
    """The audit sees it under FSDP2 as it does elsewhere."""
    model = bodies.Bypassed()
    fully_shard(model)
    with refusal("kept.weight"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()


@distributed(world_size=2)
def test_all_captures_of_one_model_share_one_group_of_hosts(rank: int) -> None:
    """Where the weights' group is not of gloo: captures one after the other make no group each."""
    p, model = problem("mlp", 4), wrap("fsdp2", problem("mlp", 4).model())
    groups = dist.distributed_c10d._world.pg_map
    counts, before = [], len(groups)
    with mock.patch.object(dist, "get_backend", lambda group=None: "nccl"):
        for _ in range(3):
            captured(model, p, p.rows(slice(2 * rank, 2 * rank + 2)))
            counts.append(len(groups))
        assert isinstance(model, FSDPModule)
        made = lockstep.gloo_group(lockstep.sharing_group(model))
    dist.destroy_process_group(made)
    lockstep._of_hosts.clear()
    assert counts == [before + 1] * 3
