"""`gramian.optim.KFAC` on several processes is one optimizer: DDP, FSDP2, tensor parallelism, uneven and empty ranks.

Over 20 steps, five refreshes among them; nine in a short run.
"""

import copy

import pytest
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import gramian
from tests.curvature.splits import CASES, assert_equal
from tests.dist import kfac_bodies as bodies
from tests.dist import tp_bodies
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

TWO = {"uneven": [[0, 2, 4], [1, 3]], "empty": [[3, 0, 1, 4, 2], []]}
THREE = [[3, 1], [], [0, 4, 2]]


@pytest.mark.parametrize("split", TWO)
@pytest.mark.parametrize("case", ["many words", "pictures", "reused"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2 root"])
@distributed(world_size=2)
def test_steps_of_two_processes_are_those_of_one(rank: int, way: str, case: str, split: str) -> None:
    one = CASES[case]
    expected = bodies.optimized(one, one.model(), [0, 1, 2, 3, 4])
    found = bodies.optimized(one, bodies.wrapped(way, one.model()), TWO[split][rank], world=2)
    assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@distributed(world_size=3)
def test_steps_of_three_processes_are_those_of_one(rank: int, way: str) -> None:
    one = CASES["many words"]
    expected = bodies.optimized(one, one.model(), [0, 1, 2, 3, 4])
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
    assert_equal(bodies.optimized(one, model, TWO["uneven"][rank], world=2, resumed=resumed), expected, 1e-10)


@pytest.mark.parametrize("name, style", [("mlp", "usual"), ("gpt", "tables"), ("long gpt", "sequence")])
@distributed(world_size=2)
def test_tensor_parallel_steps_are_those_of_one(rank: int, name: str, style: str) -> None:
    case = tp_bodies.CASES[name]
    expected = bodies.optimized(case, case.model(), [0, 1, 2, 3, 4])
    model = tp_bodies.spread(case.model(), name, style, 1, 2)
    assert_equal(bodies.optimized(case, model, [0, 1, 2, 3, 4]), expected, 1e-10)


@pytest.mark.full
@distributed(world_size=4)
def test_tensor_parallel_times_fsdp2_is_one_optimizer(rank: int) -> None:
    case = tp_bodies.CASES["gpt"]
    expected = bodies.optimized(case, case.model(), [0, 1, 2, 3, 4])
    model = tp_bodies.spread(case.model(), "gpt", "usual", 2, 2)
    assert_equal(bodies.optimized(case, model, TWO["uneven"][rank // 2], world=2), expected, 1e-10)
