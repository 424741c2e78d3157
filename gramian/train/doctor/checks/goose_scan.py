"""The states of a Goose model's memory layers, computed in parallel chunks, must equal the sequential recurrence."""

import torch
from torch import Tensor

from gramian.models.goose.goose_layers import LeakyMemory
from gramian.models.goose.scan import sequential_scan
from gramian.models.token_sampling import evaluation_mode
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import logits_of

TOLERANCE = 1e-4
"""Maximum relative error of a memory layer's float32 states."""


def goose_scan(run: ExaminedRun) -> list[Check]:
    """Compare the states of every Goose memory layer with the sequential recurrence in float64, on one forward pass."""
    model = run.trial_model
    memories = {name: module for name, module in model.named_modules() if isinstance(module, LeakyMemory)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> "torch.utils.hooks.RemovableHandle":
        return memories[name].register_forward_hook(
            lambda module, inputs, output: seen.__setitem__(name, (inputs[0].detach(), output[0].detach()))
        )

    handles = [hook(name) for name in memories]
    micro = run.batch(2).micro[0]
    try:
        with evaluation_mode(model), run.numbers.autocast():
            logits_of(model, micro["tokens"])
    finally:
        for handle in handles:
            handle.remove()
    worst = 0.0
    for name, (u_BTD, read_BTD) in seen.items():
        decay_D = memories[name].decay_logit.detach().double().sigmoid()
        expected_BTD = (1 - decay_D.square()).sqrt() * sequential_scan(u_BTD.double(), decay_D)
        largest = expected_BTD.abs().max().clamp(min=1e-30)
        worst = max(worst, float((read_BTD.double() - expected_BTD).abs().max() / largest))
    ok = worst <= TOLERANCE
    hint = "" if ok else "the parallel recurrence loses or adds state: it must equal the sequential one"
    return [Check("scan = sequential", f"{worst:.2g}", f"≤ {TOLERANCE:g}", ok, hint, worst)]
