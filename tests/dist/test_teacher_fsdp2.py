"""A teacher sharded by FSDP2 says what the whole one says, with its head whole on every process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.distill.teacher.head_proof import head_of
from gramian.distill.teacher.language_model import teacher_hash
from gramian.distill.teacher.live_teacher import LiveTeacher, shard_teacher
from gramian.distill.teacher.signal import tensors_of
from tests.distill.teachers import TEACHERS, batch_of, gpt, is_frozen, windows
from tests.kit.processes import distributed
from tests.kit.refusals import refusal

pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.parametrize("family", ["gpt", "gpt tied", "goose", "gpt2", "llama", "gemma2, capped"])
@distributed(world_size=2)
def test_sharded_is_whole(rank: int, family: str) -> None:
    whole = LiveTeacher(TEACHERS[family](), layers=(0, 2))
    model = shard_teacher(TEACHERS[family]())
    teacher = LiveTeacher(model, layers=(0, 2))
    assert teacher.sharded and not whole.sharded and is_frozen(teacher)
    # Other windows, and another number of them, on every process.
    for index in ([rank, 5, 9][: rank + 2], [3 + rank], [rank, 5]):
        batch = batch_of(windows(), index)
        one, other = teacher(batch), whole(batch)
        for a, b in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert torch.equal(one.head.weight_VD, other.head.weight_VD)
        # The loss reads the head long after the forward.
        logits_BTV: Tensor = one.head.logits(one.hidden_BTD)
        assert torch.allclose(logits_BTV, other.head.logits(other.hidden_BTD), atol=1e-5)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    kept = [p for p in model.parameters() if not isinstance(p, DTensor)]
    assert len(kept) == len({id(p) for p in _head(model).parameters()})
    assert sum(p.numel() for p in sharded) > 2 * sum(p.to_local().numel() for p in sharded) - 200


def _head(model: nn.Module) -> nn.Module:
    return model.head if hasattr(model, "head") else model.get_output_embeddings()  # type: ignore[operator, return-value]


@pytest.mark.parametrize("family", ["gpt tied", "llama"])
@distributed(world_size=2)
def test_sharding_does_not_change_what_a_teacher_is(rank: int, family: str) -> None:
    before = teacher_hash(TEACHERS[family]())
    model = shard_teacher(TEACHERS[family]())
    assert teacher_hash(model) == before == LiveTeacher(model).hash


@distributed(world_size=2)
def test_a_head_that_is_sharded_and_a_second_sharding_are_refused(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    with refusal("^teacher: the weight of its head is sharded.*shard_teacher"):
        head_of(fully_shard(gpt()))
    with refusal("^teacher: is sharded already"):
        shard_teacher(shard_teacher(gpt()))
