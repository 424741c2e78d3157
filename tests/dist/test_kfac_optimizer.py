"""`gramian.optim.KFAC` on several processes is one optimizer: DDP, FSDP2, tensor parallelism, uneven and empty ranks.

Over 20 steps, five refreshes among them; nine in a short run.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gramian
from gramian.curvature.refresh.shared_factorisation import SharedTensor, share_tensors
from gramian.linalg import inverse_roots
from gramian.optim import whitened_steps
from gramian.parallel.exchange import exchange_of
from tests.curvature.splits import CASES, assert_equal
from tests.dist import kfac_bodies as bodies
from tests.dist import tp_bodies
from tests.kit.processes import distributed
from tests.kit.refusals import refused

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

TWO = {"uneven": [[0, 2, 4], [1, 3]], "empty": [[3, 0, 1, 4, 2], []]}
THREE = [[3, 1], [], [0, 4, 2]]


@contextmanager
def sharing(iterated: bool = False) -> Iterator[list[int]]:
    """Roots are shared however small they are; yields the widths of those that this process computes.

    `iterated`: those of float32 are computed in float16, as on a GPU.
    """
    computed: list[int] = []
    root = inverse_roots.inverse_fourth_root

    def counted(stack_BNN: Tensor, condition: float) -> Tensor:
        computed.extend([stack_BNN.shape[-1]] * len(stack_BNN))
        return root(stack_BNN, condition)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whitened_steps, "SPARED", 0.0)
        patch.setattr(inverse_roots, "inverse_fourth_root", counted)
        for module in (inverse_roots, whitened_steps) if iterated else ():
            patch.setattr(module, "root_dtype", lambda dtype, _: torch.float16 if dtype == torch.float32 else dtype)
        yield computed


@pytest.mark.parametrize("split", TWO)
@pytest.mark.parametrize("case", ["many words", "pictures", "reused"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2 root"])
@distributed(world_size=2)
def test_steps_of_two_processes_are_those_of_one(rank: int, way: str, case: str, split: str) -> None:
    one = CASES[case]
    expected = bodies.optimized(one, one.model(), [0, 1, 2, 3, 4])
    with nullcontext() if way == "fsdp2 root" else sharing():
        found = bodies.optimized(one, bodies.wrapped(way, one.model()), TWO[split][rank], world=2)
    assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@distributed(world_size=3)
def test_steps_of_three_processes_are_those_of_one(rank: int, way: str) -> None:
    one = CASES["many words"]
    expected = bodies.optimized(one, one.model(), [0, 1, 2, 3, 4])
    with sharing():
        found = bodies.optimized(one, bodies.wrapped(way, one.model()), THREE[rank], world=3)
    assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("whole, flat", [(True, False), (False, True)])  # torch loads no state that is both
@distributed(world_size=2)
def test_a_state_of_distributed_checkpoints_goes_on(rank: int, whole: bool, flat: bool) -> None:
    """Over FSDP2, into an optimizer that has not stepped yet, and whose output layer no forward has shown."""
    one = CASES["many words"]

    def resumed(model: nn.Module, optimizer: gramian.optim.KFAC) -> tuple[nn.Module, gramian.optim.KFAC]:
        options = StateDictOptions(full_state_dict=whole, flatten_optimizer_state_dict=flat)
        saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        other = bodies.wrapped("fsdp2", one.model())
        again = gramian.optim.KFAC(other, **bodies.OPTIMIZED | {"lr": 7.0})
        set_state_dict(other, again, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
        return other, again

    expected = bodies.optimized(one, one.model(), [0, 1, 2, 3, 4])
    model = bodies.wrapped("fsdp2", one.model())
    with sharing():
        found = bodies.optimized(one, model, TWO["uneven"][rank], world=2, resumed=resumed)
    assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("name, style", [("mlp", "usual"), ("gpt", "tables"), ("long gpt", "sequence")])
@distributed(world_size=2)
def test_tensor_parallel_steps_are_those_of_one(rank: int, name: str, style: str) -> None:
    case = tp_bodies.CASES[name]
    expected = bodies.optimized(case, case.model(), [0, 1, 2, 3, 4])
    model = tp_bodies.spread(case.model(), name, style, 1, 2)
    with sharing():
        found = bodies.optimized(case, model, [0, 1, 2, 3, 4])
    assert_equal(found, expected, 1e-10)


@pytest.mark.full
@distributed(world_size=4)
def test_tensor_parallel_times_fsdp2_is_one_optimizer(rank: int) -> None:
    case = tp_bodies.CASES["gpt"]
    expected = bodies.optimized(case, case.model(), [0, 1, 2, 3, 4])
    model = tp_bodies.spread(case.model(), "gpt", "usual", 2, 2)
    with sharing():
        found = bodies.optimized(case, model, TWO["uneven"][rank // 2], world=2)
    assert_equal(found, expected, 1e-10)


# ---- shared roots ----------------------------------------------------------------------------------------------------


def net_of(widths: list[int], dtype: torch.dtype = torch.float64) -> nn.Module:
    """Linear layers of these widths and a head, whose weights are the same on all processes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = [layer for m, o in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(m, o), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(widths[-1], 3)).to(dtype)


def captured(optimizer: gramian.optim.KFAC, model: nn.Module, rank: int, step: int, scale: float = 1.0) -> None:
    """A capture of four rows of this rank."""
    first = next(p for p in model.parameters())
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, first.shape[1], dtype=torch.float64, generator=generator).to(first.dtype)
    optimizer.zero_grad()
    with optimizer.capture(num_terms=4) as capture:
        (scale * F.cross_entropy(model(x), torch.arange(4) % 3)).backward()
        assert capture is None or callable(capture.next)


def operators_of(optimizer: gramian.optim.KFAC) -> list[Tensor]:
    return [t for group in optimizer._steps.groups for t in (group.P, group.D, group.least)]


def bits_of(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


SHARES = {"one": [[8], [], []], "two": [[9], [9], []], "five": [[10, 10], [6, 10], [10]]}
WIDTHS = {"one": [8, 12], "two": [9, 9], "five": [6, 10, 10, 10]}


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("roots", SHARES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@distributed(world_size=3)
def test_each_process_computes_its_share_of_the_roots_and_all_have_the_same_bits(
    rank: int, way: str, roots: str, dtype: torch.dtype
) -> None:
    """`dtype` is that of the roots."""
    model = bodies.wrapped(way, net_of(WIDTHS[roots], torch.promote_types(dtype, torch.float32)))
    optimizer = gramian.optim.KFAC(model, update_freq=2, max_tokens=None)
    with sharing(iterated=dtype == torch.float16) as computed:
        for step in range(5):
            captured(optimizer, model, rank, step)
            here = SHARES[roots][rank] if step % 2 == 0 else []
            assert sorted(computed) == here
            optimizer.step()
            assert sorted(computed) == here
            computed.clear()
        operators = operators_of(optimizer)
        bits: list[str] = [""] * 3
        dist.all_gather_object(bits, bits_of(operators))
        assert len({*bits}) == 1
        facts, total = optimizer.record()["operators"], sum(map(len, SHARES[roots]))
        assert facts["roots"] == {"here": len(SHARES[roots][rank]), "all": total}
        name = str(dtype).removeprefix("torch.")
        assert facts["root_products"] == ["bf16x3, then float16" if dtype == torch.float16 else name]
        assert max(facts["measured"]["root_errors"].values()) < 50 * torch.finfo(dtype).eps
        optimizer._steps.make(*optimizer._whitened(optimizer._trained()))
    for found, alone in zip(operators, operators_of(optimizer), strict=True):
        assert float((found - alone).norm()) <= 50 * torch.finfo(dtype).eps * float(alone.norm())


@distributed(world_size=2)
def test_a_process_that_leaves_out_steps_and_a_dropped_refresh_hold_up_nobody(rank: int) -> None:
    """A step of a model that is not sharded is none of the others' business; so roots are not shared in it."""
    model = bodies.wrapped("ddp", net_of(WIDTHS["five"]))
    optimizer = gramian.optim.KFAC(model, update_freq=1, max_tokens=None)
    with sharing() as computed:
        for step in range(6):
            captured(optimizer, model, rank, step, scale=float("nan") if step == 3 and rank == 0 else 1.0)
            if step % 2 == rank and step != 3:
                optimizer.step()
        assert optimizer.kfac.refreshes == 5 and len(optimizer.kfac.dropped) == 1
    counts = [0, 0]
    dist.all_gather_object(counts, len(computed))
    assert sum(counts) == 5 * 5 and abs(counts[0] - counts[1]) <= 5


@distributed(world_size=2)
def test_a_root_that_fails_on_one_process_fails_on_all_and_training_goes_on(rank: int) -> None:
    models = [bodies.wrapped("ddp", net_of(WIDTHS["five"])) for _ in range(2)]
    optimizers = [gramian.optim.KFAC(model, update_freq=1, max_tokens=None) for model in models]
    with sharing():
        for step in range(4):
            for model, optimizer, fails in zip(models, optimizers, (False, step == 1), strict=True):
                with pytest.MonkeyPatch.context() as patch:
                    if fails and rank == 1:
                        patch.setattr(inverse_roots, "inverse_fourth_root", lambda *_: [][0])
                    with pytest.raises((gramian.GramianError, IndexError)) if fails else nullcontext() as caught:
                        captured(optimizer, model, rank, step)
                if caught is not None:
                    assert rank == 1 or str(caught.value).startswith("process 1: IndexError: list index out of range;")
                optimizer.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


@distributed(world_size=3)
def test_processes_outside_the_group_go_their_own_way(rank: int) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    try:
        group = alone if rank == 2 else pair
        model = DistributedDataParallel(net_of(WIDTHS["five"]), process_group=group)
        optimizer = gramian.optim.KFAC(model, update_freq=2, max_tokens=None)
        with sharing() as computed:
            for step in range(5 if rank == 2 else 3):
                captured(optimizer, model, rank, step)
                optimizer.step()
    finally:
        for group in (pair, alone):
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)
    assert sorted(computed) == sorted([[10, 10, 6] * 2, [10, 10] * 2, [6, 10, 10, 10, 10] * 3][rank])


@distributed(world_size=3)
def test_shared_tensors_of_several_dtypes_are_those_of_their_processes(rank: int) -> None:
    exchange = exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    dtypes = [torch.float64, torch.float16, torch.float64, torch.float32, torch.float64]
    wanted = [SharedTensor(f"{i}", 5.0 - i, (i + 1, 2), dtype, torch.device("cpu")) for i, dtype in enumerate(dtypes)]
    before = exchange.sent["all_gather"]
    found = share_tensors(
        exchange, wanted, lambda places: [torch.full((i + 1, 2), 10.0 * i + rank, dtype=dtypes[i]) for i in places]
    )
    owners = [0, 1, 2, 2, 1]  # costs 5, 4, 3, 2, 1
    for i, t in enumerate(found):
        assert t.dtype == dtypes[i] and t.shape == (i + 1, 2) and bool((t == 10 * i + owners[i]).all())
    messages = exchange.sent["all_gather"] - before
    assert messages >= 2 * sum(t.nbytes for t, owner in zip(found, owners, strict=True) if owner == rank)


@distributed(world_size=2)
def test_processes_that_would_share_other_tensors_are_refused(rank: int) -> None:
    exchange = exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    shape = (2, 2 + rank)
    with refused("process 1: shares other tensors than process 0; expected the same weights"):
        wanted = [SharedTensor("up A", 8.0, shape, torch.float32, torch.device("cpu"))]
        share_tensors(exchange, wanted, lambda places: [torch.ones(shape) for _ in places])


def test_roots_are_shared_from_a_size_on_that_shapes_alone_decide() -> None:
    def worth(widths: list[int], size: int) -> bool:
        optimizer = gramian.optim.KFAC(net_of(widths, torch.float32))
        return whitened_steps.worth_sharing(optimizer._hidden_blocks({}).values(), size)

    assert [worth([1024, 1024], size) for size in (1, 2, 64)] == [False, True, True]
    assert [worth([128] * layers, 2) for layers in (3, 20)] == [False, True]
    assert not worth([1024, 1100], 2)  # one root: nobody is spared
