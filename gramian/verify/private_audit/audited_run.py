"""A run's model, data and private stepper for an audit, as `gramian train` builds them: on one process, with a new key.

Legend: B windows, T tokens.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.data import Windows, load_windows
from gramian.data.document_rows import DocumentWindows
from gramian.linalg.wide import wide
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.accounting.noise_search import find_noise_multiplier
from gramian.privacy.noise.noise_strategy import kind_of
from gramian.train.build.build_model import build_model, set_recomputation
from gramian.train.build.build_optimizer import build_curvature, build_optimizer
from gramian.train.config.config import Config
from gramian.train.config.config_sections import CompileSection, PrivacySection
from gramian.train.loop.objective import IGNORED, Objective, logits_of
from gramian.train.loop.precision import Precision, resolve_precision, set_globals
from gramian.train.loop.private_stepper import PrivateStepper
from gramian.train.loop.public_curvature import PublicCurvature
from gramian.train.state.saved_run import load_run


class CraftedObjective(Objective):
    """Model and loss of a run, in which a window can ask for a multiple of its loss, to get a gradient of any size.

    It asks by its first target: −101 − k stands for the k-th of `scales` and has no loss term. Others have the run's loss.
    """

    scales: Tensor

    def __init__(self, model: nn.Module, scales: tuple[float, ...]) -> None:
        super().__init__(model)
        self.register_buffer("scales", torch.tensor([*scales, 1.0]), persistent=False)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, coefficient: float | Tensor, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Objective.forward`, with the sum over windows weighted by their scales."""
        code_B = IGNORED - 1 - targets_BT[:, 0]
        scale_B = self.scales[torch.where(code_B >= 0, code_B, len(self.scales) - 1)]
        logits_BTV = wide(logits_of(self.model, tokens_BT, documents_BT))
        terms_N = F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.clamp(min=IGNORED).flatten(), ignore_index=IGNORED, reduction="none"
        )
        total = (terms_N.view(targets_BT.shape).sum(1) * scale_B.to(terms_N)).sum()
        return total * coefficient, total.detach()


@dataclass
class AuditedRun:
    """The parts of a run that its audit needs."""

    config: Config
    privacy: PrivacySection
    model: nn.Module
    windows: Windows
    numbers: Precision
    grid: ProcessGrid
    noise_multiplier: float
    """σ of the run."""

    @property
    def sample_rate(self) -> float:
        """q of the run: expected batch over windows."""
        return self.config.data.batch / len(self.windows)

    @contextmanager
    def private(
        self, windows: Any = None, *, scales: tuple[float, ...] = (), proof: int | str | None = None
    ) -> Iterator[PrivateStepper]:
        """Context manager: a `PrivateStepper` on a copy of the model, which has the run's options and a new key.

        Args:
            windows: data set to draw from; None: that of the run.
            scales: multiples of the loss that windows can ask for (`CraftedObjective`).
            proof: option of the row proof; None: the run's.
        """
        config, noise = self.config, self.noise_multiplier
        privacy = replace(self.privacy, noise_multiplier=noise, target_epsilon=None, proof=proof or self.privacy.proof)
        module = CraftedObjective(copy.deepcopy(self.model), scales) if scales else Objective(copy.deepcopy(self.model))
        module.to(self.grid.device)
        optimizer = build_optimizer(module, config.optimizer, self.grid.device, None, config.run.seed)
        audited = replace(config, privacy=privacy, data=replace(config.data, user=""))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "proof: is|accountant: ")
            curvature = self._curvature(module)
            data = self.windows if windows is None else windows
            stepper = PrivateStepper(module, optimizer, self.numbers, self.grid, audited, data, curvature)
        if curvature is not None:
            curvature.refresh(0)
        try:
            yield stepper
        finally:
            stepper.engine.detach()
            stepper.close()

    def _curvature(self, module: nn.Module) -> PublicCurvature | None:
        """The public curvature in whose metric the run clips and draws noise; None without one."""
        kfac = build_curvature(self.config, module)
        if kfac is None:
            return None
        return PublicCurvature(module, copy.deepcopy(module), kfac, self.config, self.numbers, self.grid)


def open_run(config: Config, grid: ProcessGrid, folder: Path | None, noise_multiplier: float | None) -> AuditedRun:
    """Load data and model of a private run, on one process; with the run's weights if it has a folder.

    `noise_multiplier` is σ of the run, from its record; None: as the config gives it, or computed from its target_epsilon. A
    run whose unit is a document or a user is audited with units of one window, the first of each.

    Raises:
        GramianError: if the config has no [privacy], or does not fit data or machine.
    """
    if config.privacy is None:
        raise GramianError("privacy: the run has no such section; expected a private run to audit")
    privacy = config.privacy
    curvature = config.kfac if privacy.metric == "kfac" else None  # what else it does acts on released sums
    config = replace(config, kfac=curvature, compile=CompileSection(mode="off"), data=replace(config.data, workers=0))
    numbers = resolve_precision(config.precision, grid.device)
    if numbers.scales:  # gradients would have another scale in every step
        numbers = Precision("fp32", numbers.device)
    set_globals(config.precision, config.run.deterministic)
    windows, _ = load_windows(config.data)
    if privacy.unit != "window":  # a unit of one record: its first window
        windows = DocumentWindows(windows, by_user=privacy.unit == "user").first_of_units()
        privacy = replace(privacy, unit="window", max_records_per_unit=None)
    model = build_model(config, windows.vocabulary) if folder is None else load_run(folder, "argument RUN_DIR").model
    model = model.to(device=grid.device, dtype=numbers.weights)
    set_recomputation(model, config.parallel.checkpoint_blocks)
    noise = noise_multiplier if noise_multiplier is not None else privacy.noise_multiplier
    if noise is None:
        assert privacy.target_epsilon is not None
        rate = config.data.batch / len(windows)
        rest: tuple[int | str, ...] = kind_of(privacy.noise, privacy.bands, rate)
        if privacy.max_draw is not None:
            rest = (len(windows), privacy.max_draw)
        noise = find_noise_multiplier(
            privacy.target_epsilon, privacy.delta, rate, config.run.steps, privacy.accountant, rest
        )
    return AuditedRun(config, privacy, model, windows, numbers, grid, noise)
