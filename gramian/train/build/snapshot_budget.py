"""Plan how many snapshots of a run's state fit into the memory of its host, before the first one is allocated."""

import os
from dataclasses import replace

from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.parallel.process_grid import ProcessGrid
from gramian.plan.host_memory import HostPlan, available_memory, copy_bytes, plan_host
from gramian.plan.transformer_memory import optimizer_states
from gramian.train.build.memory_needs import noise_buffers
from gramian.train.config.config import Config
from gramian.train.loop.precision import Precision


def factor_bytes(plan: CurvaturePlan) -> int:
    """Return the bytes of all stored K-FAC factors in a curvature plan; a snapshot of any process contains all of them."""
    return sum(total.settled for total in plan.totals.values())


def plan_snapshots(
    config: Config, grid: ProcessGrid, numbers: Precision, model: nn.Module, kfac: KFACNaturalGradient | None
) -> HostPlan:
    """Plan how many copies of the run's state each process keeps in host memory: the minimum over processes (collective).

    `model` is not yet distributed over processes. Raises `GramianError` on all processes if the minimum that a run needs does
    not fit on one of them.
    """
    factors = 0
    if kfac is not None:
        tokens = config.data.batch * config.data.length
        factors = factor_bytes(kfac.plan(model, tokens=tokens, activations=numbers.activations))
    sharded = grid.uses_fsdp2 and grid.size > 1
    copy = copy_bytes(
        [p.shape for p in model.parameters()],
        numbers.weights.itemsize,
        optimizer_states(config.optimizer.kind, config.optimizer.momentum) + noise_buffers(config),
        shards=grid.size if sharded else 1,
        pinned=grid.device.type == "cuda",
        factors=factors,
    )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", grid.size))
    plan = plan_host(copy, config.checkpoint.snapshots, processes, sharded, available_memory())
    fewest = int(-grid.most(-float(plan.snapshots if plan.fits else 0)))
    if not fewest:
        elsewhere = (
            "checkpoint.snapshots: they do not fit into the memory of another host; expected what its error names"
        )
        raise GramianError(elsewhere if plan.fits else plan.refusal)
    return replace(plan, snapshots=fewest)
