"""Units of privacy on several gloo processes, against the loop over the documents, or users, of all ranks."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.oracles.clipped_sum import clip
from gramian.privacy.clipping.clip_factors import SLACK
from tests.dist.private_bodies import moved_by, own_names, parameters_of
from tests.dist.worlds import wrap
from tests.kit.matrix import sample
from tests.kit.processes import distributed
from tests.kit.refusals import refusal
from tests.privacy import packed
from tests.privacy.problems import assert_sums
from tests.statistics.problems import problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.xdist_group("processes")]
CLIPPING = ("auto", "bookkeeping", "keep", "two_pass")
USERS = (0, 1, 0, 2, 1, 1, 0, 3, 1, 4)
PACKINGS: dict[int, tuple[Sequence[packed.Packing], ...]] = {
    1: ([[[0, 1, 2], [3, 4], [5]]],),
    2: ([[[0, 1, 2], [3, 4]], [[5]]], [[[5, 4], [3, 0], [2, 1]], []]),
    3: ([[[1, 0], [4, 3]], [[5]], [[2]]], [[[5, 4]], [], [[3, 0], [2, 1]]]),
}
"""{processes: for each case the packed documents of each rank}."""


def private(model: nn.Module, limit: float, loader: Any, **options: Any) -> tuple[gramian.PrivacyEngine, Any, Any]:
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=5)
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": limit, "loss_reduction": "sum", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = engine.make_private(
            module=model, optimizer=SGD(model.parameters(), lr=1.0), data_loader=loader, **settings
        )
    return engine, made[1], made[2]


def packed_step(rank: int, way: str, number: int, clipping: str, kind: str) -> None:
    """A step moves the weights by −(1/2) Σ_u c_u g_u over the documents of all ranks, however these are packed."""
    limit = float(packed.norms(kind).median())
    plain = packed.model_of(kind)
    model = wrap(way, packed.model_of(kind))
    loader = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    options = {"poisson_sampling": False, "expected_batch": 2.0, "clipping": clipping}
    engine, optimizer, _ = private(model, limit, loader, **options)
    rows = packed.packed(PACKINGS[dist.get_world_size()][number][rank])
    with engine.units(rows.ids):
        engine.backward(packed.loss_of(model, rows))
    optimizer.step()
    moved = {name: -2.0 * m for name, m in moved_by(model, parameters_of(plain)).items()}
    assert_sums(moved, packed.wanted(kind, limit).totals, 1e-9)
    engine.detach()


def cells(processes: int) -> list[tuple[Any, ...]]:
    return [*itertools.product(range(len(PACKINGS[processes])), CLIPPING, packed.KINDS)]


@pytest.mark.parametrize("number, clipping, kind", sample(cells(1), 1))
@distributed(world_size=1)
def test_packed_documents_on_one_process(rank: int, number: int, clipping: str, kind: str) -> None:
    packed_step(rank, "ddp", number, clipping, kind)


@pytest.mark.parametrize("number, clipping, kind", sample(cells(2), 3))
@distributed(world_size=2)
def test_packed_documents_on_two_uneven_ranks(rank: int, number: int, clipping: str, kind: str) -> None:
    packed_step(rank, "ddp", number, clipping, kind)


@pytest.mark.parametrize("number, clipping, kind", sample(cells(3), 1))
@distributed(world_size=3)
def test_packed_documents_on_three_uneven_ranks(rank: int, number: int, clipping: str, kind: str) -> None:
    packed_step(rank, "ddp", number, clipping, kind)


@pytest.mark.parametrize("number, clipping, kind", sample(cells(2), 2))
@distributed(world_size=2)
def test_packed_documents_of_a_sharded_model(rank: int, number: int, clipping: str, kind: str) -> None:
    packed_step(rank, "fsdp2", number, clipping, kind)


@pytest.mark.few_proofs(every=1)
@distributed(world_size=2)
def test_a_mask_that_is_missing_on_one_rank_is_refused_on_all(rank: int) -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = packed.model_of("gpt")

        def forward(self, tokens: Any, documents: Any) -> Any:
            return self.gpt(tokens, documents if dist.get_rank() == 0 else None)

    loader = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    model = wrap("fsdp2", Switched())
    engine, _, _ = private(model, 1.0, loader, poisson_sampling=False)
    rows = packed.packed(PACKINGS[2][0][0])
    elsewhere = "" if rank else "^process 1: .*"
    with refusal(f"{elsewhere}expected tokens that depend on those of their own"), engine.units(rows.ids):
        packed.loss_of(model, rows).backward()
    engine.detach()


def user_step(rank: int, world_size: int, way: str, **options: Any) -> None:
    """Every draw moves the weights by the clipped sum over its users, whose records are on one rank each."""
    p = problem("mlp", 10)
    limit = 1.5 * float(p.norms().median())
    model = wrap(way, p.model())
    loader = DataLoader(TensorDataset(*p.batch), batch_size=1)
    engine, optimizer, draws = private(
        model, limit, loader, unit_of=torch.tensor(USERS), expected_batch=2.5, max_physical_batch=4, **options
    )
    assert engine.sample_rate == 0.5
    for pieces in itertools.islice(draws.draws(), 2):
        before, own = parameters_of(model), []
        for batch in pieces:
            optimizer.zero_grad()
            p.case.loss(model, *batch, reduction="sum").backward()
            own += [*zip(draws._last[0].indices, draws._last[0].units, strict=True)]
            optimizer.step()
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, own)
        users: dict[int, list[int]] = {}
        for mine in everywhere:
            assert not users.keys() & {user for _, user in mine}  # no user is on two ranks
            for index, user in mine:
                users.setdefault(user, []).append(index)
        assert all(
            records == [i for i, user in enumerate(USERS) if user == number] for number, records in users.items()
        )
        current = p.case.make(p.dtype)
        current.load_state_dict(own_names(before), strict=False)
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name, _ in current.named_parameters()}
        for records in users.values():
            current.zero_grad()
            p.case.loss(current, *p.rows(records), reduction="sum").backward()
            for name, q in current.named_parameters():
                gradients[name].append(torch.zeros_like(q) if q.grad is None else q.grad.clone())
        moved = {name: -2.5 * m for name, m in moved_by(model, before).items()}
        if users:
            stacked = {name: torch.stack(parts) for name, parts in gradients.items()}
            assert_sums(moved, clip(stacked, limit / (1 + SLACK[torch.float64])).totals, 1e-9)
        else:
            assert all(not bool(m.any()) for m in moved.values())
    engine.detach()


@distributed(world_size=2)
def test_users_on_two_ranks(rank: int) -> None:
    user_step(rank, 2, "ddp")


@distributed(world_size=3)
def test_users_on_three_ranks(rank: int) -> None:
    user_step(rank, 3, "ddp", clipping="keep")


@distributed(world_size=2)
def test_users_of_a_sharded_model(rank: int) -> None:
    user_step(rank, 2, "fsdp2")


@distributed(world_size=2)
def test_ranks_that_know_other_units_are_refused(rank: int) -> None:
    p = problem("mlp", 10)
    loader = DataLoader(TensorDataset(*p.batch), batch_size=1)
    users = torch.tensor(USERS) if rank == 0 else torch.tensor(USERS).flip(0)
    with refusal("^unit_of: is not the same on every process"):
        private(wrap("ddp", p.model()), 1.0, loader, unit_of=users)
