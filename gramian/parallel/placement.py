"""Putting a result where its parameter lives."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def place_like(full: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process holds in full, sharded as another one is.

    Args:
        full: the same on every process.
        like: a parameter; a plain one leaves the tensor as it is.

    Returns:
        This process's shard as a DTensor with the parameter's mesh and placements. No communication.
    """
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
