"""The second pass of EK-FAC: a capture that measures the eigenvalues of factors that exist already.

S = (1/N) Σ_b (Q_Gᵀ Y_b Q_A)⊙² over the samples b of this pass and its N loss terms; it may see the data of the first pass again
or other data. The memory that it takes does not depend on how many batches it sees.
"""

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import module_of
from gramian.curvature.estimate.eigenbasis_sums import EigenbasisSums
from gramian.curvature.estimate.eigenvalue_sums import EigenvalueSums
from gramian.curvature.estimate.ekfac_sums import bases_of
from gramian.curvature.estimate.kfac_capture import KFACCapture, LossArguments
from gramian.curvature.estimate.likelihood import Likelihood, Softmax
from gramian.curvature.estimate.loss_checks import CoefficientCheck
from gramian.curvature.refresh import finish_correction, refresh_schedule
from gramian.curvature.state import CurvatureState
from gramian.linalg.wide import exact_float32
from gramian.parallel.exchange import Exchange
from gramian.taps.records import ParameterRecord


class CorrectionCapture(KFACCapture):
    """The context of `kfac.correct(...)`: passes inside it measure EK-FAC's eigenvalues, leaving it sets them. Collective.

    ```python
    with kfac.correct(model, num_terms=y0.numel()) as cap:
        loss(model(x0), y0).backward()
        cap.next(num_terms=y1.numel())  # before each further forward and backward
        loss(model(x1), y1).backward()
    ```
    """

    def __init__(
        self,
        state: CurvatureState,
        model: nn.Module,
        eigenvalues: EigenvalueSums,
        loss: LossArguments,
        exchange: Exchange | None,
        estimate: str,
    ) -> None:
        """Set up the statistic `eigenvalues`; `estimate`: "empirical" or "mc", where the labels of the passes come from."""
        super().__init__(state, model, eigenvalues, None, finish_correction.finish, loss, estimate, exchange)
        self._eigenvalues = eigenvalues

    def parameter(self, record: ParameterRecord) -> None:
        """Receive a parameter with all its uses: the samples of its block are projected, and their tokens freed."""
        super().parameter(record)
        self._eigenvalues.complete(record)


def open_correction(
    state: CurvatureState,
    model: nn.Module,
    loss: LossArguments,
    estimate: str = "empirical",
    likelihood: Likelihood = Softmax(),  # noqa: B008 (frozen)
) -> CorrectionCapture:
    """The context of a second pass over a model with factors, whose eigenvectors it finds first. Collective.

    The head is exact if its factors are. A GramianError is raised if there are no factors, EK-FAC is off, the model is another
    one, or an exact head is that of another distribution than `likelihood`: on all processes.
    """
    state.refuse_nested()
    exchange = refresh_schedule.model_exchange(state, model)
    with refresh_schedule.announced(state, exchange):
        loss.check()
        state.require_factors()
        if not state.options.ekfac:
            raise GramianError("ekfac: is False, so that eigenvalues are K-FAC's; expected ekfac=True")
        root = module_of(model)
        if state.model is not None and state.model is not root:
            raise GramianError("model: the factors here are those of another model; expected one object for each model")
        specs = state.checked_specs(root)
        exact = {block.facts.estimate for block in state.blocks.values() if block.facts.estimate.startswith("exact ")}
        if exact - {f"exact {likelihood.name}"}:
            raise GramianError(
                f"factors: their head is {min(exact)}; expected kfac.fit(...) for both passes of that loss"
            )
    with torch.no_grad(), exact_float32():
        bases = bases_of(state.blocks, state.options, state.factorisations)
        budgeted, blocks = state.options.budget is not None, state.blocks
        sums = {name: EigenbasisSums.of(blocks[name], pair, budgeted) for name, pair in bases.items() if name in specs}
    check = CoefficientCheck(due=not state.correction_checked)
    eigenvalues = EigenvalueSums(specs, sums, bases, bool(exact), state.head, likelihood, coefficient=check)
    return CorrectionCapture(state, model, eigenvalues, loss, exchange, estimate)
