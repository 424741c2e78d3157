"""Passes over a batch for the Fisher: with the data's own labels (empirical) or drawn from the model (Monte Carlo).

Legend: B samples, T tokens, V outputs of one position (classes, channels).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import refuse_open_capture
from gramian.curvature.estimate.kfac_capture import KFACCapture, global_ids
from gramian.curvature.estimate.labelled_batch import (
    LabelledBatch,
    Positions,
    class_axis_of,
    logits_of,
    positions,
    read_batch,
    token_weights,
    without,
)
from gramian.curvature.estimate.likelihood import Bernoulli, Gaussian, Likelihood, Softmax, check_loss
from gramian.curvature.options import check_count
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.user_names import named_parameters
from gramian.taps.roles import Withheld

FISHER_TYPES = ("empirical", "mc", "true")


def check_draws(fisher_type: Any, n_samples: Any, generator: Any) -> None:
    """Raise a GramianError for the first of these arguments of `collect_kfac_factors` whose value is not allowed."""
    if fisher_type not in FISHER_TYPES:
        names = ", ".join(f'"{name}"' for name in FISHER_TYPES)
        raise GramianError(f"fisher_type: expected one of {names}, got {fisher_type!r}")
    check_count("n_samples", n_samples)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise GramianError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")


@dataclass(frozen=True)
class LabelArguments:
    """The arguments of `collect_kfac_factors` that determine loss and labels; each field is explained there."""

    fisher_type: str
    n_samples: int
    generator: torch.Generator | None
    sample_ids: Tensor | None
    causal_shift: bool | None
    loss: str | None = None
    noise_scale: float = 1.0
    class_axis: int | None = None

    @property
    def drawn(self) -> bool:
        """True if labels are drawn from the model's own distribution ("mc", "true")."""
        return self.fisher_type != "empirical"

    def estimate(self, likelihood: Likelihood) -> str:
        """Where labels of a distribution come from, for the record: "empirical" or "mc", and its name if it is no softmax."""
        found = "mc" if self.drawn else "empirical"
        return found if isinstance(likelihood, Softmax) else f"{found}, {likelihood.name}"

    def stated_likelihood(self) -> Likelihood:
        """The distribution of `loss`; a softmax where none is stated."""
        if self.loss == "mse":
            return Gaussian(float(self.noise_scale))
        return Bernoulli() if self.loss == "bce" else Softmax()

    def exact_head(self, likelihood: Likelihood, always: bool) -> bool:
        """Whether the head's Fisher is exact: `always`, or with fisher_type "true"; a GramianError where it cannot be."""
        found = always or self.fisher_type == "true"
        if found and not likelihood.at_head:
            raise GramianError(
                'fisher_type: a softmax over tokens is that of no layer, so there is no exact head; expected "empirical" or '
                '"mc", and kfac_true_fisher_head=False'
            )
        return found

    def check(self) -> None:
        """Raise a GramianError for the first argument whose value is not allowed."""
        check_draws(self.fisher_type, self.n_samples, self.generator)
        check_loss(self.loss, self.noise_scale)
        if self.class_axis is not None and (isinstance(self.class_axis, bool) or self.class_axis not in (1, -1)):
            raise GramianError(f"class_axis: expected 1, -1 or None, got {self.class_axis!r}")


@dataclass(frozen=True)
class Question:
    """What a pass asks of a model: a batch, the distribution that its outputs stand for, and the axis of their classes."""

    batch: LabelledBatch
    likelihood: Likelihood = Softmax()
    class_axis: int | None = None
    """1 or -1; None: found from the shapes of labels and outputs."""

    def outputs(self, root: nn.Module) -> Tensor:
        """The outputs [B, ..., V] of a forward, as the model has its axes."""
        alone = not isinstance(self.likelihood, Softmax)
        return logits_of(root(*self.batch.args, **self.batch.kwargs), alone)

    def find_positions(self, root: nn.Module) -> Positions:
        """The positions with a loss term; a forward shows the outputs' shape where it does not follow from the labels."""
        labels, shape = self.batch.labels, None
        if self.batch.unlabelled or (labels is not None and self.likelihood.per_output(labels)):
            with torch.no_grad():
                outputs = self.outputs(root).shape
            shape = without(outputs, class_axis_of(outputs, labels, self.likelihood, self.class_axis))
        return positions(self.batch, shape)

    def aligned(self, outputs: Tensor, found: Positions) -> tuple[Tensor, Tensor | None]:
        """(outputs [*positions, V], labels of these positions, None without) with the classes as last axis.

        A GramianError is raised if labels and outputs differ in shape.
        """
        labels = found.labels
        axis = class_axis_of(outputs.shape, labels, self.likelihood, self.class_axis)
        rows = outputs.movedim(axis, -1)
        if rows.shape[:-1] != found.counted.shape:
            raise GramianError(
                f"labels: have shape {list(found.counted.shape)}; expected {list(rows.shape[:-1])}, as the logits"
            )
        if labels is not None and self.likelihood.per_output(labels):
            labels = labels.movedim(axis, -1) if labels.shape == outputs.shape else labels[..., None]
        return rows, labels


def question_of(
    root: nn.Module, batch: Any, arguments: LabelArguments, forward: Callable[..., Any] | None = None
) -> Question:
    """Read a batch and the distribution that its labels belong to.

    `forward`: the model's own one, inside a capture, which has replaced it; None: no capture may be open. A GramianError is
    raised if fisher_type "empirical" finds no labels, if the loss does not follow from the labels' type, if it cannot have
    these labels, or if a capture of the model is open.
    """
    found = read_batch(root, batch, arguments.causal_shift, classes=False, forward=forward)
    likelihood = _likelihood(root, found, arguments)
    labels = found.labels
    if not isinstance(likelihood, Softmax) or (labels is not None and likelihood.per_output(labels)):
        if arguments.causal_shift:
            raise GramianError(
                "causal_shift: is True, but these labels belong to the outputs as they are; expected None"
            )
        found = replace(found, shifted=False)
    if not arguments.drawn and found.unlabelled:
        raise GramianError('labels: expected them in the batch for fisher_type="empirical"')
    if forward is None:
        refuse_open_capture(root)
    return Question(found, likelihood, arguments.class_axis)


def _likelihood(root: nn.Module, batch: LabelledBatch, arguments: LabelArguments) -> Likelihood:
    """The distribution of `loss`, or if that is None the one that follows from the labels' type or the model's config."""
    labels, loss = batch.labels, arguments.loss
    if batch.is_span and loss not in (None, "cross_entropy"):
        raise GramianError(f'loss: is "{loss}", but start and end positions are classes; expected "cross_entropy"')
    if loss is None and labels is not None and (labels.is_floating_point() or labels.dtype == torch.bool):
        task = getattr(getattr(root, "config", None), "problem_type", None)
        loss = {"regression": "mse", "multi_label_classification": "bce"}.get(task) if isinstance(task, str) else None
        if loss is None:
            raise GramianError(
                'labels: expected integer classes, or loss="mse", "bce" or "cross_entropy" (of probabilities) for numbers'
            )
    if labels is not None and labels.dtype == torch.bool and loss == "cross_entropy":
        raise GramianError(
            'labels: are True and False; expected integer classes for loss="cross_entropy", or loss="bce"'
        )
    if arguments.noise_scale != 1.0 and loss != "mse":
        raise GramianError(f'noise_scale: is {arguments.noise_scale:g}, which is a property of loss="mse"; expected 1')
    return Softmax(at_head=False) if batch.is_span else replace(arguments, loss=loss).stated_likelihood()


def run_pass(
    root: nn.Module,
    question: Question,
    found: Positions,
    draw: int | None,
    seed: int,
    samples: Tensor,
    cap: KFACCapture | None = None,
) -> None:
    """Run a forward, and a backward of the summed loss of the batch's labels (`draw` None) or of drawn ones.

    `found` are the positions with a loss term; drawn labels depend on `seed`, the ids `samples` [B] and the number `draw`. A
    GramianError is raised if labels and logits differ in shape or classes. `cap`, if given, is the open capture: it tells how
    many classes the head has, so that a tensor-parallel head which returns only some of them is an error too.
    """
    likelihood = question.likelihood
    outputs, labels = question.aligned(question.outputs(root), found)
    if cap is not None and hub_of(root).tensor_parallel is not None and likelihood.at_head:
        _refuse_part_of_classes(cap, outputs)
    if draw is None:
        assert labels is not None
        likelihood.check(labels, found.counted, outputs)
    targets = labels if draw is None else likelihood.draw(outputs, seed, samples, draw)
    assert targets is not None
    likelihood.summed_loss(outputs, targets, found.counted).backward()


def run_passes(
    root: nn.Module,
    question: Question,
    capture: Callable[[Positions, Tensor | None], KFACCapture],
    draws: int | None,
    seed: int,
    sample_ids: Tensor | None,
) -> None:
    """Run one captured pass over a batch with its own labels (`draws` None), or one for every draw of labels.

    `capture` opens a capture for positions and token weights. Draws and token subsets depend on `seed` and `sample_ids` [B];
    None: ids that count the samples over all processes (`global_ids`). The model's gradients, buffers and random state are
    restored. A GramianError is raised if a parameter gets a gradient other than through its own module.
    """
    batch = question.batch
    with ExitStack() as around:
        around.enter_context(preserve_state(root))
        found = question.find_positions(root)
        weights, *others = token_weights(batch, found) or (None,)
        cap = capture(found, weights)
        cap.other_weights = tuple(other for other in others if other is not None)
        if not batch.inputs.shape[0]:
            cap.batch_size = 0  # stated, so that no row is taken for a sample
        samples = global_ids(sample_ids, 0, batch.inputs.shape[0], cap.sample_sharding)
        around.enter_context(hub_of(root).governed_by(Withheld()))
        around.enter_context(cap)  # after the rule: where no weight gradient is formed there is nothing to audit
        for draw in range(draws or 1):
            cap.draw = draw
            cap.next(num_terms=found.terms, token_weights=weights, sample_ids=samples)
            run_pass(root, question, found, None if draws is None else draw, seed, samples, cap)
        stray = [name for name, p in named_parameters(root) if p.grad is not None]
        if stray:
            raise GramianError(
                f"{stray[0]}: got a gradient past its layer; expected the weight to be used through its own module only"
            )


def _refuse_part_of_classes(cap: KFACCapture, logits: Tensor) -> None:
    """Raise a GramianError if a tensor-parallel head returns only its own classes to each process: labels need all."""
    head = cap.kronecker.head or cap.output_layer()
    classes = next((spec.outputs for spec in cap.kronecker.specs.values() if head in spec.layers), logits.shape[-1])
    if logits.shape[-1] != classes:
        raise GramianError(
            f"{head}: returns {logits.shape[-1]} of its {classes} classes to each process; "
            "expected ColwiseParallel(output_layouts=Replicate())"
        )
