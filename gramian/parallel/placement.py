"""Shard a full tensor as a parameter is sharded."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def place_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor as the parameter `like` is sharded; returns a DTensor on the same mesh. No communication.

    Args:
        full: the full tensor, equal on every process.
        like: the parameter; if it is not a DTensor, `full` is returned unchanged.
    """
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
