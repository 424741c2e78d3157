"""Shard a full tensor as a parameter is sharded."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def place_like(full: Tensor, like: Tensor) -> Tensor:
    """A full tensor as a DTensor with the mesh and placements of the parameter `like`. No communication.

    Args:
        full: the same on every process.
        like: the parameter; for a plain one the tensor is returned unchanged.
    """
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
