"""The run must fit into the memory of one GPU, or of all GPUs of the machine; planned without allocating anything."""

from typing import cast

import torch

from gramian.core.byte_amounts import format_bytes
from gramian.plan.parallel_strategy import decide
from gramian.plan.transformer_memory import Kind
from gramian.train.build.memory_needs import needs_of
from gramian.train.config.config import Config
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.precision import Precision


def device_memory(run: ExaminedRun) -> list[Check]:
    """Check by the memory planner whether the run fits on the GPUs of this machine."""
    if run.numbers.device != "cuda":
        return [Check("memory", "no GPU", "-", True, "gramian plan --gpus N --gpu-memory GB")]
    cards = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return [planned(run.config, run.windows.vocabulary, run.numbers, len(cards), min(cards))]


def planned(config: Config, vocabulary: int, numbers: Precision, gpus: int, gpu_memory: int) -> Check:
    """Check whether the run fits on one GPU of `gpu_memory` bytes, or on `gpus` of them; K-FAC and clipping are not counted."""
    needs = needs_of(config, vocabulary, cast("Kind", numbers.kind), "cuda")
    decision, hint = decide(needs, 1, gpu_memory, config.parallel.strategy), ""
    if not decision.fits:
        hint = decision.why
        several = decide(needs, gpus, gpu_memory, config.parallel.strategy)
        if several.fits:
            decision, hint = several, f"with torchrun --nproc_per_node={gpus}: {several.why}"
    size = min(decision.rows[-1].sizes) if decision.strategy is None else decision.bytes_of(decision.strategy)
    return Check("memory", format_bytes(size), format_bytes(decision.usable), decision.fits, hint, size)
