"""The plain tensors inside a wrapper subclass, such as the integers and scales of a quantised weight."""

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(t: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass (`__tensor_flatten__`) is made of, in its order; [t] for any other tensor."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    return [inner for name in names for inner in plain_tensors(getattr(t, name))]
