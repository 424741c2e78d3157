"""Factors of a whole corpus: a refresh on passes over any number of batches, and with EK-FAC a second pass over them.

Memory does not grow with the number of batches: the first pass stores what the representation of a factor allows (rows up to
its rank, else a matrix), the second one r·s numbers for each block.

Samples are numbered across batches: the i-th sample of process r of W is sample i·W + r, in both passes. Labels that are drawn
depend on seed, sample, position and draw alone, so both passes draw the same, however the samples are divided into batches.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import module_of, refuse_open_capture
from gramian.curvature.estimate import fisher_labels, open_capture, second_pass
from gramian.curvature.estimate.fisher_labels import LabelArguments
from gramian.curvature.estimate.kfac_capture import KFACCapture, LossArguments, global_ids
from gramian.curvature.estimate.labelled_batch import token_weights
from gramian.curvature.refresh import refresh_schedule
from gramian.curvature.state import CurvatureState
from gramian.parallel.exchange import Exchange
from gramian.parallel.lockstep import Lockstep, sharing_group
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.user_names import named_parameters
from gramian.taps.roles import Withheld

Progress = Callable[[str, int], Any]
"""Called after each batch with the name of the pass ("factors", "eigenvalues") and the number of its batches so far."""


def fit(
    state: CurvatureState,
    model: nn.Module,
    batches: Iterable[Any],
    sample_ids: Iterable[Tensor] | None,
    labels: LabelArguments,
    head: str | None,
    progress: Progress | None,
) -> None:
    """Replace all factors by those of `batches`, and with EK-FAC their eigenvalues; one step, which always refreshes.

    If the second pass fails, the factors from before stay, as they do if the first fails. Collective.
    """
    root = module_of(model)
    with open_capture.step(state, model, force=True) as (_, exchange):
        labels.check()
        _check_iterable("batches", batches, state.options.ekfac)
        if sample_ids is not None:
            _check_iterable("sample_ids", sample_ids, state.options.ekfac)
        refuse_open_capture(root)
    draw_seed, subset_seed = state.seeds
    if labels.generator is not None:
        draw_seed, subset_seed = refresh_schedule.draw_seed(labels.generator), draw_seed
    before, loss = state.factors_now(), LossArguments("sum", 0.0, None)
    try:
        run = _Passes(root, batches, sample_ids, labels, draw_seed, progress)
        likelihood, estimate = run.likelihood, labels.estimate(run.likelihood)
        exact_head = labels.exact_head(likelihood, state.options.kfac_true_fisher_head)
        cap = open_capture.open_refresh(
            state, model, loss, exchange, head, exact_head, estimate, subset_seed, False, likelihood
        )
        run("factors", cap)
    except BaseException as error:
        if exchange is not None:  # if the capture has announced an error already, that one counts
            refresh_schedule.refresh_rendezvous(state, exchange).decline(f"{type(error).__name__}: {error}")
        raise
    if not state.options.ekfac or state.refreshes == before["refreshes"]:
        return
    dropped = len(state.dropped)
    try:
        run("eigenvalues", second_pass.open_correction(state, model, loss, estimate, likelihood))
        run.refuse_other_samples(exchange)
    except BaseException:
        state.restore_factors(before)
        raise
    if len(state.dropped) > dropped:
        state.restore_factors(before)


def _check_iterable(name: str, values: Any, twice: bool) -> None:
    if isinstance(values, str | Tensor | dict) or not isinstance(values, Iterable):
        raise GramianError(f"{name}: expected an iterable with one entry for each batch, got {type(values).__name__}")
    if twice and isinstance(values, Iterator):
        raise GramianError(
            f"{name}: is an iterator, which a second pass (ekfac=True) cannot read again; "
            "expected a list, a DataLoader or another iterable that starts anew"
        )


class _Passes:
    """Runs the forwards and backwards of all batches inside a capture, once for the factors and once for eigenvalues."""

    def __init__(
        self,
        root: nn.Module,
        batches: Iterable[Any],
        sample_ids: Iterable[Tensor] | None,
        labels: LabelArguments,
        seed: int,
        progress: Progress | None,
    ) -> None:
        """Read the first batch, whose labels say which distribution they belong to; the first pass begins with it."""
        self.root, self.batches, self.sample_ids = root, batches, sample_ids
        self.labels, self.seed, self.progress = labels, seed, progress
        self.forward = root.forward  # before a capture replaces it
        self.samples: list[int] = []
        """Number of samples of each pass."""
        with preserve_state(root):
            reader = iter(batches)
            first = next(reader, None)
            self._begun: tuple[Iterator[Any], Tensor] | None = (
                itertools.chain([] if first is None else [first], reader),
                torch.get_rng_state(),
            )
            """The reader of the first pass, and torch's random state after its first batch, which shuffling changes."""
        self.likelihood = labels.stated_likelihood()
        if first is not None:
            self.likelihood = fisher_labels.question_of(root, first, labels).likelihood

    def __call__(self, stage: str, cap: KFACCapture) -> None:
        """Run all batches inside `cap`; the model's gradients, buffers and random state are restored.

        Both passes begin with the same random state, so dropout draws the same masks in both.
        """
        first = number = 0
        with ExitStack() as around:
            around.enter_context(preserve_state(self.root))
            around.enter_context(hub_of(self.root).governed_by(Withheld()))
            around.enter_context(cap)  # after the rule: where no weight gradient is formed there is nothing to audit
            for batch, ids in self._numbered():
                first += self._run(cap, batch, ids, first)
                number += 1
                if self.progress is not None:
                    self.progress(stage, number)
            if not number and cap.exchange is None:
                raise GramianError("batches: has none; expected at least one batch")
            stray = [name for name, p in named_parameters(self.root) if p.grad is not None]
            if stray:
                raise GramianError(
                    f"{stray[0]}: got a gradient past its layer; expected the weight to be used through its own module only"
                )
        self.samples.append(first)

    def refuse_other_samples(self, exchange: Exchange | None) -> None:
        """Raise a GramianError, on all processes, if a second pass had another number of samples than the first."""
        found = [self.samples] if exchange is None else exchange.gather_messages(self.samples)
        for one, other in found:
            if one != other:
                raise GramianError(
                    f"batches: {one} samples in one pass, {other} in the other; expected the same in both"
                )

    def _run(self, cap: KFACCapture, batch: Any, ids: Tensor | None, first: int) -> int:
        """Run the passes over one batch; `first` is the number of samples before it on this process. Returns its samples."""
        labels = self.labels
        question = fisher_labels.question_of(self.root, batch, labels, self.forward)
        if question.likelihood != self.likelihood:
            raise GramianError(
                f"labels: are those of {question.likelihood.name}; expected {self.likelihood.name}, as in the first batch"
            )
        size = question.batch.inputs.shape[0]
        hub_of(self.root).batch_size = None if size else 0  # stated, so that no row is taken for a sample
        found = question.find_positions(self.root)
        weights, *others = token_weights(question.batch, found) or (None,)
        cap.other_weights = tuple(other for other in others if other is not None)
        samples = global_ids(ids, first, size, cap.sample_sharding)
        for draw in range(labels.n_samples if labels.drawn else 1):
            cap.draw = draw
            cap.next(num_terms=found.terms, token_weights=weights, sample_ids=samples)
            fisher_labels.run_pass(self.root, question, found, draw if labels.drawn else None, self.seed, samples, cap)
        return size

    def _reader(self) -> Iterator[Any]:
        """The batches of a pass from the first on, with the random state that reading the first has left."""
        if self._begun is None:
            return iter(self.batches)
        (reader, state), self._begun = self._begun, None
        torch.set_rng_state(state)
        return reader

    def _numbered(self) -> Iterator[tuple[Any, Tensor | None]]:
        """(batch on the model's device, its sample ids or None), as many on each process as FSDP2's forwards need.

        Every forward of an FSDP2 model gathers weights from all processes, so one that has no batch left runs empty ones.
        """
        device = next((p.device for p in self.root.parameters()), torch.device("cpu"))
        lockstep = Lockstep(sharing_group(self.root) if isinstance(self.root, FSDPModule) else None)
        batches, last = self._reader(), None
        ids = None if self.sample_ids is None else iter(self.sample_ids)
        while True:
            batch = next(batches, None)
            if last is None and lockstep.any(batch is None) and lockstep.any(batch is not None) and not lockstep.alone:
                raise GramianError(
                    "batches: has none on some process; expected at least one, which may be empty, on each process of FSDP2"
                )
            if not lockstep.any(batch is not None):
                return
            if batch is None:
                yield pytree.tree_map(lambda t: t[:0] if isinstance(t, Tensor) else t, last), None
                continue
            last = batch = pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
            if ids is None:
                yield batch, None
            else:
                own = next(ids, None)
                if own is None:
                    raise GramianError(
                        "sample_ids: ended before the batches did; expected integers [B] for every batch"
                    )
                yield batch, own
