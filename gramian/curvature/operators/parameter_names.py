"""The names that parameters are asked for by."""

from collections.abc import Iterable

from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.operators.parameter_space import Which
from gramian.taps.model.user_names import named_parameters


def first_names(root: nn.Module | None, which: Which) -> Which:
    """Parameters as they are asked for, but a tied one under its first name, whichever of its names is used.

    Args:
        root: the user's module; None where it is gone, and with it the other names.
        which: names, or what is asked of each (name, parameter); None: all.

    Raises:
        GramianError: if it is none of these.
    """
    if which is None or isinstance(which, str) or callable(which):
        return which
    asked = [*which] if isinstance(which, Iterable) else [which]
    if not all(isinstance(name, str) for name in asked):
        raise GramianError(
            f"parameters: is {which!r}; expected a list of names, a function of (name, parameter), or None"
        )
    if root is None:
        return asked
    first = {id(p): name for name, p in unique_parameters(root)}
    tied = {name: first[id(p)] for name, p in named_parameters(root)}
    return [tied.get(name, name) for name in asked]
