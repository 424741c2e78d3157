"""Snapshots of the training state must fit into the memory that this host has left."""

import torch

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_optimizer import build_curvature
from gramian.train.build.snapshot_budget import plan_snapshots
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun


def host_copies(run: ExaminedRun) -> list[Check]:
    """Check whether the snapshots (copies of the training state) of a run of one process fit into this host's memory."""
    kfac = build_curvature(run.config, run.trial_model)
    grid = ProcessGrid(0, 1, torch.device(run.numbers.device))
    try:
        plan = plan_snapshots(run.config, grid, run.numbers, run.trial_model, kfac)
    except GramianError as problem:
        return [Check("host memory", "too much", "-", False, str(problem))]
    hint = str(plan) if plan.snapshots < plan.wish else ""
    return [Check("host memory", format_bytes(plan.host), format_bytes(plan.usable or 0), True, hint, plan.host)]
