"""The row proof on gloo processes: under DDP each proves its own batches; under FSDP2 all prove, and all raise, or none."""

import math
import weakref
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gramian
from gramian.taps.hub import hub_of
from tests.dist import tp_bodies
from tests.dist.private_bodies import private_squares
from tests.dist.worlds import assert_same_bits, gradients, mine, wrap
from tests.kit.processes import distributed
from tests.kit.refusals import refusal

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

WAYS = ("ddp", "fsdp2", "fsdp2 kept")
SIZES = ((3, 1), (1, 4), (5, 5), (2, 0), (0, 9))
COUPLED = ("centred", "sorted", "one row less")


HOW: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


class Net(nn.Module):
    """Two layers, between which samples may be coupled."""

    def __init__(self, how: str = "apart") -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 5), nn.Linear(5, 3), how
        if how == "shared":
            self.table = nn.Embedding(2, 3)

    @property
    def how(self) -> str:
        """How samples are coupled; outside of the model, whose attributes are compared in every forward."""
        return HOW[self]

    @how.setter
    def how(self, how: str) -> None:
        HOW[self] = how

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.how == "centred":
            return self.last(h - h.mean(0))
        if self.how == "sorted":
            order = x[:, 0].argsort()
            return self.last(h[order])[order.argsort()]
        if self.how == "shared":
            return self.last(h) + self.table(torch.zeros(1, dtype=torch.long)).view(3)
        if self.how == "one row less":
            return torch.cat([self.last(h[1:]), h[:1, :3]])
        return self.last(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int, sizes: tuple[int, ...]) -> Tensor:
    return torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[
        mine(rank, sizes)
    ]


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def own_norms(x: Tensor) -> Tensor:
    """Norms of single samples, by a loop on one process."""
    found = []
    for i in range(len(x)):
        model = net()
        step(model, x[i : i + 1])
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    return torch.stack(found) if found else x.new_zeros(0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_every_rank_proves_its_own_batch_and_leaves_no_trace(rank: int, way: str, sizes: tuple[int, ...]) -> None:
    x, plain, model = batch(rank, sizes), wrap(way, net()), wrap(way, net())
    step(plain, x)
    state = torch.get_rng_state()
    with gramian.per_sample_norms(model, "sum") as norms:
        step(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(gradients(model), gradients(plain))
    torch.testing.assert_close(norms.values, own_norms(x), rtol=1e-9, atol=1e-12)
    proven = [found.runs for found in hub_of(model).proof.proven.values()]
    assert proven == ([2 * math.ceil(math.log2(len(x))) + 4] if len(x) > 1 else [])


@distributed(world_size=2)
def test_an_argument_that_one_rank_cannot_take_apart_is_refused_on_all(rank: int) -> None:
    model, x = wrap("fsdp2", net()), batch(rank, (3, 2))
    named = "^model: is given a tensor that is of torch.sparse" if rank else "^process 1: model: is given a tensor"
    with refusal(named), gramian.per_sample_norms(model, "sum"):
        model(x, torch.eye(2).to_sparse() if rank else torch.eye(3)).square().sum().backward()
    with gramian.per_sample_norms(model, "sum") as norms:
        step(model, x)
    torch.testing.assert_close(norms.values, own_norms(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", COUPLED)
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("coupled, sizes", [(0, (3, 4)), (1, (1, 4)), (1, (0, 3)), (0, (4, 2))])
@distributed(world_size=2)
def test_all_ranks_of_a_sharded_model_raise_where_one_is_refuted_and_go_on_together(
    rank: int, way: str, how: str, coupled: int, sizes: tuple[int, ...]
) -> None:
    bare = net()
    model, x = wrap(way, bare), batch(rank, sizes)
    bare.how = how if rank == coupled else "apart"
    named = rf"^{'' if rank == coupled else f'process {coupled}: '}(first|last|model)\b"
    with refusal(named), gramian.per_sample_norms(model, "sum"):
        step(model, x)
    bare.how = "apart"
    with gramian.per_sample_norms(model, "sum") as norms:
        step(model, x)
    torch.testing.assert_close(norms.values, own_norms(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS[1:])  # under DDP the row carries copies instead
@distributed(world_size=2)
def test_code_that_fails_on_an_expanded_row_is_refused_by_the_layers_name(rank: int, way: str) -> None:
    model = wrap(way, Net("shared").double())
    with (
        refusal("^table: returns one row for all samples, and the code behind it fails"),
        gramian.per_sample_norms(model, "sum"),
    ):
        step(model, batch(rank, (3, 4)))
    dist.barrier()


@pytest.mark.parametrize("how", COUPLED)
@distributed(world_size=2)
def test_under_ddp_the_rank_that_is_refuted_raises_before_anything_is_reduced(rank: int, how: str) -> None:
    bare = net()
    model, x = wrap("ddp", bare), batch(rank, (4, 3))
    engine, optimizer = private_squares(model)
    before = deepcopy(bare.state_dict())
    bare.how = how if rank == 1 else "apart"
    if rank == 1:
        with refusal(r"^(first|last)\b"):
            step(model, x)
        bare.how = "apart"
    else:
        step(model, x)
        with refusal(r"^process 1: (first|last)\b"):
            optimizer.step()
        optimizer.zero_grad()
    step(model, x)  # both are at the same place
    optimizer.step()
    assert any(not torch.equal(before[name], p) for name, p in bare.state_dict().items())
    engine.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("due", [(0,), (1,), (0, 1)])
@distributed(world_size=2)
def test_a_repeat_that_is_due_on_one_rank_only(rank: int, way: str, due: tuple[int, ...]) -> None:
    bare = net()
    model, x = wrap(way, bare), batch(rank, (4, 3))
    engine, optimizer = private_squares(model, proof=1)
    assert engine._model is not None
    engine._model.clipping.proof_is_due = lambda: rank in due and engine._model.proof_is_due()
    for coupled in (False, False, True):
        optimizer.zero_grad()
        bare.how = "centred" if coupled and rank == due[-1] else "apart"
        together = way != "ddp" or rank == due[-1]
        if coupled and together:
            elsewhere = "" if rank == due[-1] else f"process {due[-1]}: "
            with refusal(f"^{elsewhere}last: the input of sample"):
                model(x)
            assert engine.proof["releases not covered"] is not None and engine.proof["releases not covered"][1] == 2
        elif not coupled:
            step(model, x)
            optimizer.step()
    engine.detach()
    dist.barrier()


@distributed(world_size=2)
def test_a_tensor_parallel_model_trusts_shapes_and_its_record_says_so(rank: int) -> None:
    """K-FAC, which needs sums alone, is what captures such a model; whatever tells samples apart is refused."""
    case, records = tp_bodies.CASES["gpt"], []
    for model in (case.model(), tp_bodies.spread(case.model(), "gpt", "tables", 1, 2)):
        kfac = tp_bodies.make()
        tp_bodies.refresh(kfac, model, case.data(3), [0, 1, 2])
        records.append(kfac.record()["shared_rows"])
    assert records == ["proven", "taken from shapes, as the model is tensor parallel"]
    with refusal("is tensor parallel, which only K-FAC and private"), gramian.per_sample_norms(model):
        model(case.data(3)[0]).sum().backward()
    model(case.data(3)[0].roll(1, 0)).sum().backward()  # other tokens of the same shape


class TimeFirst(nn.Module):
    """Layers that have the batch on axis 1, inside a model with the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h.transpose(0, 1)


@pytest.mark.parametrize("sizes", [(3, 2), (4, 0), (1, 3)])
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@distributed(world_size=2)
def test_samples_on_another_axis_are_found_on_every_process(rank: int, way: str, sizes: tuple[int, ...]) -> None:
    """Also where tokens are as many as samples, in one batch or on one process, or a process has one sample, or none."""
    torch.manual_seed(0)
    model = TimeFirst().double()
    generator = torch.Generator().manual_seed(1)
    alone = deepcopy(model)
    wrapped = wrap(way, model)
    for length in (5, 3, 4):
        x = torch.randn(sum(sizes), length, 4, generator=generator, dtype=torch.float64)[mine(rank, sizes)]
        with gramian.per_sample_norms(wrapped, loss_reduction="sum") as norms:
            wrapped(x).square().sum().backward()
        want = []
        for one in x:
            alone.zero_grad()
            alone(one[None]).square().sum().backward()
            want.append(torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).norm())
        torch.testing.assert_close(norms.values, torch.stack(want) if want else x.new_zeros(0), rtol=1e-9, atol=0)
