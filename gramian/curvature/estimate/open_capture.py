"""Open a refresh: on the user's own passes (`capture`), or on passes over a batch (`collect`).

Both count one step. A call with wrong arguments does not count, unless several processes share the step: the others count it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import has_factors, module_of
from gramian.curvature.blocks.output_head import known_head, same_head, seen_head
from gramian.curvature.estimate import fisher_labels
from gramian.curvature.estimate.fisher_labels import LabelArguments
from gramian.curvature.estimate.kfac_capture import IdleCapture, KFACCapture, LossArguments
from gramian.curvature.estimate.kronecker_sums import KroneckerSums
from gramian.curvature.estimate.labelled_batch import Positions
from gramian.curvature.estimate.likelihood import Likelihood, Softmax
from gramian.curvature.estimate.loss_checks import CoefficientCheck
from gramian.curvature.estimate.remainder_sums import RemainderSums
from gramian.curvature.memory.memory_budget import keeps_of
from gramian.curvature.refresh import finish_refresh, refresh_schedule
from gramian.curvature.state import CurvatureState
from gramian.parallel.exchange import Exchange


def capture(
    state: CurvatureState, model: nn.Module, loss: LossArguments, head: str | None, force: bool, correct: bool
) -> KFACCapture | IdleCapture:
    """The context for the user's passes in one step: a `KFACCapture`, or an `IdleCapture` if the step does not refresh.

    `correct`: with EK-FAC, measure its eigenvalues too, for which the tokens are stored.
    """
    with step(state, model, force) as (due, exchange):
        loss.check()
        exact_head, seed = state.options.kfac_true_fisher_head, state.seeds[0]
        if not due:
            return IdleCapture()
        return open_refresh(state, model, loss, exchange, head, exact_head, "empirical", seed, correct)


def collect(
    state: CurvatureState, model: nn.Module, batch: Any, labels: LabelArguments, head: str | None, force: bool
) -> None:
    """Count one step and, if a refresh is due, make new factors from passes over `batch`, with its own labels or drawn ones.

    An error on this process is also raised on the other processes that share the refresh.
    """
    root = module_of(model)
    with step(state, model, force) as (due, exchange):
        labels.check()
        question = fisher_labels.question_of(root, batch, labels)
        exact_head = labels.exact_head(question.likelihood, state.options.kfac_true_fisher_head)
    if not due:
        return
    draw_seed, subset_seed = state.seeds
    if labels.generator is not None:
        draw_seed, subset_seed = refresh_schedule.draw_seed(labels.generator), draw_seed

    def opened(found: Positions, weights: Tensor | None) -> KFACCapture:
        loss = LossArguments("sum", found.terms, weights)
        estimate = labels.estimate(question.likelihood)
        return open_refresh(
            state, model, loss, exchange, head, exact_head, estimate, subset_seed, likelihood=question.likelihood
        )

    try:
        draws = labels.n_samples if labels.drawn else None
        fisher_labels.run_passes(root, question, opened, draws, draw_seed, labels.sample_ids)
    except BaseException as error:
        if exchange is not None:  # if the capture has announced an error already, that one counts
            rendezvous = refresh_schedule.refresh_rendezvous(state, exchange)
            rendezvous.decline(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def step(state: CurvatureState, model: nn.Module, force: bool) -> Iterator[tuple[bool, Exchange | None]]:
    """Count one step and yield (whether it refreshes, `Exchange` of the processes that share it; None: this process alone).

    A GramianError inside the `with` block rejects the step.
    """
    state.refuse_nested()
    exchange = refresh_schedule.model_exchange(state, model)
    due = refresh_schedule.begin_step(state, force, exchange)
    try:
        yield due, exchange
    except GramianError as error:
        refresh_schedule.reject_step(state, due, exchange, error)
        raise


def open_refresh(
    state: CurvatureState,
    model: nn.Module,
    loss: LossArguments,
    exchange: Exchange | None,
    head: str | None,
    exact_head: bool,
    estimate: str,
    seed: int,
    correct: bool = True,
    likelihood: Likelihood = Softmax(),  # noqa: B008 (frozen)
) -> KFACCapture:
    """A `KFACCapture` of a model; a GramianError if it does not fit the factors, or head or memory budget are impossible.

    `exact_head`: use the exact Fisher of the head's outputs, which stand for the distribution `likelihood`; `estimate`:
    "empirical" or "mc", for the record; `seed`: that of token subsets; `correct`: with EK-FAC, store the tokens and measure
    its eigenvalues at the end.
    """
    root, stores_samples = module_of(model), state.options.ekfac and correct
    if stores_samples and state.options.memory_budget is not None:
        raise GramianError(
            "memory_budget: does not bound the tokens that ekfac=True stores to the end of a refresh; "
            "expected kfac.fit(...), or kfac.capture(..., correct=False) and then kfac.correct(...)"
        )
    if state.model is not None and state.model is not root and state.blocks:
        raise GramianError("model: the factors here are those of another model; expected one object for each model")
    specs = state.checked_specs(root)
    found = known_head(root, head)
    if exact_head and found is not None and not has_factors(found, specs):
        raise GramianError(
            f"head: {found!r} is not a trained layer with K-FAC factors; expected the linear layer that makes the logits"
        )
    keeps_of(specs, state.options, found, exact_head)  # a budget that cannot be met is refused before any token
    kronecker = KroneckerSums(
        specs,
        state.options,
        seed,
        exact_head,
        stores_samples,
        head=found,
        check_softmax=not state.softmax_checked,
        coefficient=CoefficientCheck(due=not state.coefficient_checked),
        likelihood=likelihood,
    )
    finish = finish_refresh.finish
    cap = KFACCapture(
        state, model, kronecker, RemainderSums(state.specs_without_assumptions(root)), finish, loss, estimate, exchange
    )
    if found is None:
        kronecker.find_head = lambda: seen_head(cap.output_layer(), specs, exact_head)
    elif exact_head and not isinstance(likelihood, Softmax):  # that of a softmax is seen from its gradients
        kronecker.find_head = lambda: same_head(found, cap.output_layer())
    cap.only = state.only
    state.specs, state.model_ref = specs, weakref.ref(root)
    return cap
