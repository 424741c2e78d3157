"""Steps of a K-FAC object: which of them refresh, with which seeds, and where its processes meet for it."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import group_of, module_of, world_size
from gramian.curvature.persist import curvature_record
from gramian.parallel.exchange import Exchange, exchange_of
from gramian.parallel.rendezvous import Rendezvous, number_in

if TYPE_CHECKING:
    from gramian.curvature.kfac import KFACNaturalGradient


def others_of(kfac: "KFACNaturalGradient", model: nn.Module) -> Exchange | None:
    """The processes that will join this one's sums, as they are now; None: nobody."""
    root = module_of(model)
    group = group_of(model, root, kfac.process_group)
    kfac.world_size = world_size(group)
    if kfac.options.kfac_distributed_reduce != "none":
        device = next((p.device for p in root.parameters()), torch.device("cpu"))
        return exchange_of(group, device)
    if kfac.world_size > 1 and not kfac._warned:
        kfac._warned = True
        curvature_record.log_by_itself()
    return None


def sharing(kfac: "KFACNaturalGradient") -> Exchange | None:
    """The processes of the user's group, or all, where no model tells them; None: this one alone."""
    joined = kfac.options.kfac_distributed_reduce != "none"
    return exchange_of(kfac.process_group, torch.device("cpu")) if joined else None


def begin(kfac: "KFACNaturalGradient", force: bool, others: Exchange | None) -> bool:
    """Count a step; True if it refreshes. This is the only counter there is, and the same on all processes."""
    step, kfac.steps = kfac.steps, kfac.steps + 1
    due = kfac._last_refresh is None or step - kfac._last_refresh >= kfac.options.update_freq
    due = due or force
    kfac._before_draws = kfac._generator.get_state()
    if due:
        kfac._seeds = (draw_seed(kfac._generator), draw_seed(kfac._generator))
        kfac._meetings += others is not None
    return due


def refuse(kfac: "KFACNaturalGradient", due: bool, others: Exchange | None, error: GramianError) -> None:
    """What was refused is no step, except where others take it: they are told, and all count it."""
    if others is None:
        kfac.steps -= 1
        kfac._generator.set_state(kfac._before_draws)
    elif due:
        meeting(kfac, others).stay_away(str(error))


def meeting(kfac: "KFACNaturalGradient", others: Exchange, back: int = 0) -> Rendezvous:
    """Where the processes say that they come to join their sums; `back`: one of those before."""
    if kfac._number is None or kfac._number[0] is not others.group:
        kfac._number = (others.group, number_in(others.group))
    return Rendezvous(others.group, f"K-FAC {kfac._number[1]}, refresh {kfac._meetings - back}")


def draw_seed(generator: torch.Generator) -> int:
    """The next seed."""
    return int(torch.randint(2**62, (), generator=generator))
