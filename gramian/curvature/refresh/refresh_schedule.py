"""Steps of a K-FAC object: which of them refresh the factors, their seeds, and how errors are passed between processes.

Every capture and collection is one step, counted on all processes alike. A step refreshes if `update_freq` steps have passed
since the last refresh, or if the user forces it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import group_of, module_of, world_size
from gramian.curvature.persist import curvature_record
from gramian.curvature.state import CurvatureState
from gramian.parallel.exchange import Exchange, exchange_of
from gramian.parallel.rendezvous import Rendezvous, next_number


def model_exchange(state: CurvatureState, model: nn.Module) -> Exchange | None:
    """Collectives among the processes that share this model's data and add their sums; None: this process alone.

    The processes are looked up at this call, unless there is only one: then the model is not walked at every step.
    `kfac_distributed_reduce="none"` on several processes logs a warning once.
    """
    root, several = module_of(model), dist.is_available() and dist.is_initialized()
    group = group_of(model, root, state.process_group) if several else state.process_group
    state.world_size = world_size(group)
    if state.options.kfac_distributed_reduce != "none":
        device = next((p.device for p in root.parameters()), torch.device("cpu"))
        return exchange_of(group, device)
    if state.world_size > 1 and not state.separate_processes_logged:
        state.separate_processes_logged = True
        curvature_record.log_separate_processes()
    return None


def default_exchange(state: CurvatureState) -> Exchange | None:
    """Collectives among the user's process group, or all processes, if there is no model to ask; None: this process alone."""
    joined = state.options.kfac_distributed_reduce != "none"
    return exchange_of(state.process_group, torch.device("cpu")) if joined else None


def begin_step(state: CurvatureState, force: bool, exchange: Exchange | None) -> bool:
    """Count a step and return whether it refreshes: there was no refresh, or `update_freq` steps have passed, or `force`.

    If it does, its seeds are drawn. `exchange`: the processes that share the step; None: this process alone.
    """
    step, state.steps = state.steps, state.steps + 1
    due = state.last_refresh is None or step - state.last_refresh >= state.options.update_freq
    due = due or force
    state.generator_before_step = state.generator.get_state()
    if due:
        state.seeds = (draw_seed(state.generator), draw_seed(state.generator))
        state.shared_refreshes += exchange is not None
    return due


def reject_step(state: CurvatureState, due: bool, exchange: Exchange | None, error: GramianError) -> None:
    """Undo the count of a step whose arguments were wrong, if this process is alone (`exchange` None).

    Otherwise the step stays counted, as on the other processes; if it refreshes (`due`), `error` is sent to them.
    """
    if exchange is None:
        state.steps -= 1
        assert state.generator_before_step is not None
        state.generator.set_state(state.generator_before_step)
    elif due:
        refresh_rendezvous(state, exchange).decline(str(error))


@contextmanager
def announced(state: CurvatureState, exchange: Exchange | None) -> Iterator[None]:
    """Check arguments inside this context; on leaving it all processes know whether one of them raised an error.

    An error here is sent to the others, which raise it as a GramianError. `exchange` None: this process alone.
    """
    if exchange is None:
        yield
        return
    state.shared_refreshes += 1
    meeting = refresh_rendezvous(state, exchange)
    try:
        yield
    except BaseException as error:
        meeting.decline(str(error) or type(error).__name__)
        raise
    finally:
        state.shared_refreshes += 1  # the end of what follows has a rendezvous of its own
    absent = meeting.wait_for_all(refresh_rendezvous(state, exchange, back=2))
    if absent:
        raise GramianError(f"{absent}; expected every process to open a second pass")


def drop_refresh(state: CurvatureState, reason: str, lenient: bool = False) -> None:
    """Record and log that a refresh failed for `reason` and the old factors stay.

    `lenient`: no error is raised for this reason, unless the option `strict` is on; then a GramianError is raised here.
    """
    state.capturing = False
    again = bool(state.dropped) and state.dropped[-1]["step"] == state.steps - 2
    state.dropped.append({"step": state.steps - 1, "reason": reason})
    curvature_record.log_dropped(state.steps - 1, reason, again)
    if lenient and state.options.strict:
        raise GramianError(f"refresh: {reason}; expected none to be dropped (strict=True)")


def fail_refresh(state: CurvatureState, exchange: Exchange | None, reason: str, detail: str = "") -> None:
    """Record a failed refresh whose error this process raises; send `reason` + `detail` to the others, which raise too."""
    drop_refresh(state, reason)
    if exchange is not None:
        refresh_rendezvous(state, exchange).decline(reason + detail)


def refresh_rendezvous(state: CurvatureState, exchange: Exchange, back: int = 0) -> Rendezvous:
    """The `Rendezvous` at which processes announce that they will join their sums.

    `back`: 0 for the current refresh, 1 for the one before it.
    """
    if state.group_number is None or state.group_number[0] is not exchange.group:
        state.group_number = (exchange.group, next_number(exchange.group))
    return Rendezvous(exchange.group, f"K-FAC {state.group_number[1]}, refresh {state.shared_refreshes - back}")


def draw_seed(generator: torch.Generator) -> int:
    """Draw the next seed from a generator, an integer in [0, 2⁶²)."""
    return int(torch.randint(2**62, (), generator=generator))
