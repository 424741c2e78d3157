"""The parameters that a private step trains, and checks that they can be trained privately."""

import warnings

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.taps.model.user_names import named_parameters


def trained_parameters(root: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """{user's name: parameter} of the optimizer's trainable parameters, in the model's order; warns if the model has more.

    Raises:
        GramianError: if there are none, if the optimizer has parameters that are not the model's, or if one has a gradient hook
            or no shape yet.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, nn.Parameter] = {}
    left_out, seen = [], set[int]()
    for name, p in named_parameters(root):
        if isinstance(p, UninitializedParameter):
            raise GramianError(
                f"{name}: has no shape yet (a lazy layer); expected one forward of the model before make_private"
            )
        if p.requires_grad and id(p) not in seen:
            if id(p) not in stepped:
                left_out.append(name)
            elif p._backward_hooks:  # no gradient reaches the parameter itself, so it would never run
                raise GramianError(
                    f"{name}: has a hook on its gradient, which private training would not call; expected none (a mask can go "
                    "into the forward, or act on .grad after step())"
                )
            else:
                found[name] = p
        seen.add(id(p))
    if stepped - seen:
        raise GramianError("optimizer: has parameters that are not in the module; expected the module's own")
    if not found:
        raise GramianError(
            "optimizer: trains no parameter of the module; expected at least one with requires_grad=True"
        )
    if left_out:
        warnings.warn(
            f"optimizer: does not have {left_out[0]}{' and others' if len(left_out) > 1 else ''}, which will get no "
            "gradient; expected requires_grad=False, or all trained parameters in one optimizer",
            stacklevel=4,
        )
    return found
