"""A batch as arguments of the model's forward, its labels, and the positions that have a loss term.

Legend: B samples, T tokens, V outputs of one position (classes, channels).

A position is one prediction, a row of V outputs. In a causal model position t predicts token t+1; the decoder of an
encoder-decoder model predicts label t at position t, from inputs that are the labels moved by one. A model for question
answering predicts two positions of a sample, start and end: logits [B, 2, T], classes are tokens.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.curvature.estimate.likelihood import IGNORE, Likelihood, are_probabilities

SPAN = ("start_positions", "end_positions")
"""Labels of a model for question answering: the first and the last token of the answer."""


@dataclass(frozen=True)
class LabelledBatch:
    """A batch as arguments of the model's forward, with the labels and the mask of its positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    """Labels as the user gives them, before any shift; None: the batch has none."""
    mask_BT: Tensor | None
    """The `attention_mask` [B, T] of the tokens that make predictions (a decoder's own); None if the batch has none."""
    inputs: Tensor
    shifted: bool
    """True if position t predicts label t+1."""
    source_BT: Tensor | None = None
    """1 for the tokens that an encoder reads, 0 for padding; None: the model is not an encoder with a decoder."""
    is_span: bool = False
    """True if the model answers questions: the labels [B, 2] are positions of a sample's tokens."""

    @property
    def unlabelled(self) -> bool:
        """True if the batch has no labels and its inputs do not serve as labels; they do if position t predicts token t+1."""
        return self.labels is None and not self.shifted


def read_batch(
    model: nn.Module,
    batch: Any,
    shifted: bool | None,
    classes: bool = True,
    forward: Callable[..., Any] | None = None,
) -> LabelledBatch:
    """Read a mapping as Hugging Face models take it, or (inputs, labels), as `LabelledBatch`.

    `shifted`: whether position t predicts label t+1; None: decided by the model's class. `forward`: the model's own one, if a
    capture is open, which has replaced it. A GramianError is raised for a batch of another form, an encoder-decoder model whose
    decoder has no labels, or with `classes` for labels that are not integers.
    """
    if shifted is not None and not isinstance(shifted, bool):
        raise GramianError(f"causal_shift: expected True, False or None, got {shifted!r}")
    span, source_BT = _kind(model).endswith("ForQuestionAnswering"), None
    if isinstance(batch, Mapping):
        rest = {name: value for name, value in batch.items() if name not in ("labels", *SPAN)}
        tensors = [value for value in rest.values() if isinstance(value, Tensor)]
        if not tensors:
            raise GramianError('batch: expected tensors such as "input_ids" beside "labels"')
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        first = rest.get("input_ids", tensors[0])
        span = span or any(name in batch for name in SPAN)
        if span:
            labels = _span(batch, first)
        if _has_decoder(model):
            rest, labels, source_BT = _with_decoder_inputs(model, rest, labels, first)
            mask = rest.get("decoder_attention_mask")
        known = inspect.signature(forward or model.forward).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        args: tuple[Any, ...] = ()
        kwargs = rest
        if not open_ended and not all(name in known for name in rest):
            kwargs = {name: v for name, v in rest.items() if name in known}
            args = () if any(v is first for v in kwargs.values()) else (first,)
    elif isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch):
        if _has_decoder(model):
            raise GramianError("batch: expected a mapping with input_ids and labels for an encoder with a decoder")
        first, labels = batch
        args, kwargs, mask = (first,), {}, None
    else:
        raise GramianError(
            f"batch: expected a mapping with input_ids and labels, or (inputs, labels), got {type(batch).__name__}"
        )
    if labels is not None and (not isinstance(labels, Tensor) or (classes and labels.is_floating_point())):
        raise GramianError("labels: expected integer classes, or kfac.capture(...) around your own loss")
    if shifted is None:
        shifted = _kind(model).endswith(("ForCausalLM", "LMHeadModel")) and source_BT is None
        shifted = shifted and (labels is None or not labels.is_floating_point())
    return LabelledBatch(args, kwargs, labels, mask, first, shifted, source_BT, span)


def _kind(model: nn.Module) -> str:
    """The Hugging Face name of a model's task, such as "ForCausalLM", or the name of its class."""
    return str(getattr(model, "loss_type", None) or type(model).__name__)


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _span(batch: Mapping[str, Any], inputs: Tensor) -> Tensor | None:
    """Start and end positions as labels [B, 2], -100 for those behind the last token (an answer that was cut off)."""
    found = [batch.get(name) for name in SPAN]
    if all(positions is None for positions in found):
        return None
    for name, positions in zip(SPAN, found, strict=True):
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.shape != inputs.shape[:1]:
            raise GramianError(f"{name}: expected positions of tokens, integers [{inputs.shape[0]}]")
    labels_B2 = torch.stack([positions for positions in found if positions is not None], 1)
    return labels_B2.masked_fill(labels_B2 >= inputs.shape[1], IGNORE)


def _with_decoder_inputs(
    model: nn.Module, rest: dict[str, Any], labels: Any, inputs: Tensor
) -> tuple[dict[str, Any], Any, Tensor]:
    """(arguments with decoder_input_ids, labels, mask of the encoder's tokens) of an encoder-decoder model.

    The model itself makes decoder_input_ids from labels. Layers see either the encoder's tokens or the decoder's, told apart by
    their number: where both are as many and some of them are padding, the decoder gets one position more, without a label.
    """
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    given = rest.get("decoder_input_ids")
    if given is None and (not callable(make) or not isinstance(labels, Tensor) or labels.is_floating_point()):
        raise GramianError(
            "model: is an encoder with a decoder; expected labels [B, T] of the decoder's tokens and a model that makes its "
            "inputs from them, decoder_input_ids, or kfac.capture(...) around your own loss"
        )
    tokens_BT = make(labels) if given is None and callable(make) else given
    assert isinstance(tokens_BT, Tensor)
    rest = {**rest, "decoder_input_ids": tokens_BT}
    source_BT, own_BT = rest.get("attention_mask"), rest.get("decoder_attention_mask")
    source_BT = inputs.new_ones(inputs.shape[:2], dtype=torch.long) if source_BT is None else source_BT
    padded = bool((source_BT == 0).any()) or (isinstance(labels, Tensor) and bool((labels == IGNORE).any()))
    if source_BT.shape == tokens_BT.shape and (padded or own_BT is not None):
        rest["decoder_input_ids"] = F.pad(tokens_BT, (0, 1), value=int(getattr(model.config, "pad_token_id", 0) or 0))
        labels = None if labels is None else F.pad(labels, (0, 1), value=IGNORE)
        own_BT = torch.ones_like(tokens_BT) if own_BT is None else own_BT
        rest["decoder_attention_mask"] = F.pad(own_BT, (0, 1))
    return rest, labels, source_BT


def logits_of(output: Any, alone: bool = False) -> Tensor:
    """The logits [B, ..., V] in a model's output: its `.logits`, its first element, or itself; otherwise a GramianError.

    Start and end logits [B, T] of a model for question answering become [B, 2, T]. `alone`: outputs [B] are allowed, too, and
    become [B, 1]. A DTensor is gathered.
    """
    if getattr(output, "start_logits", None) is not None:
        return torch.stack([output.start_logits, output.end_logits], 1)
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
    if not isinstance(logits, Tensor) or logits.dim() < 2 - alone or not logits.is_floating_point():
        raise GramianError("model: returned no logits; expected a tensor [B, ..., V], alone, first, or as .logits")
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return logits[:, None] if logits.dim() == 1 else logits


def class_axis_of(outputs: torch.Size, labels: Tensor | None, likelihood: Likelihood, given: int | None) -> int:
    """The axis of outputs [B, ..., V] that holds the V classes or numbers of a position: 1 or -1.

    `given` by the user, or else found: labels have the outputs' shape without this axis, or hold probabilities along it. If
    both fit, it is the last of [B, T, V], as language models have it, and a GramianError is raised for more axes. One is
    also raised for labels of another shape.
    """
    axes = [given] if given is not None else [-1, 1] if len(outputs) > 2 else [-1]
    if labels is not None:
        per_output = likelihood.per_output(labels)
        fits = [axis for axis in axes if _fits(labels.shape, outputs, axis, per_output)]
        if not fits:
            wanted = [*outputs] if per_output else [*without(outputs, axes[0])]
            raise GramianError(f"labels: have shape {[*labels.shape]}; expected {wanted}, as the logits")
        if len(fits) > 1 and likelihood.name == "softmax" and per_output:
            fits = [axis for axis in fits if are_probabilities(labels, axis)] or fits
        axes = fits
    if len(axes) > 1 and len(outputs) > 3:
        raise GramianError(
            f"class_axis: outputs {[*outputs]} may have their classes or channels at axis 1 or last; expected 1 or -1"
        )
    return axes[0]


def _fits(labels: torch.Size, outputs: torch.Size, axis: int, per_output: bool) -> bool:
    """True if labels of this shape belong to these outputs; one number for each output may lack an axis of length 1."""
    if per_output and labels == outputs:
        return True
    return labels == without(outputs, axis) and (not per_output or outputs[axis] == 1)


def without(shape: torch.Size, axis: int) -> torch.Size:
    """The shape without one axis."""
    axis %= len(shape)
    return torch.Size((*shape[:axis], *shape[axis + 1 :]))


@dataclass(frozen=True)
class Positions:
    """The positions of a batch that have a loss term, and their labels."""

    counted: Tensor
    """Bool [B] or [B, T]: True where a position has a loss term."""
    labels: Tensor | None
    """Labels aligned with the logits; None where the batch has none."""

    @property
    def terms(self) -> float:
        """Number of positions that have a loss term."""
        return float(self.counted.sum())


def positions(batch: LabelledBatch, shape: torch.Size | None) -> Positions:
    """Find the positions of a batch with a loss term: those whose label is not -100 and whose mask is not 0.

    `shape` is the logits' without classes. None: that of the labels, which are classes. If the batch has no labels, the inputs
    are the labels under a causal shift; otherwise all positions of `shape` count. A causal shift of labels [B] is an error.
    """
    labels, mask, device = batch.labels, batch.mask_BT, batch.inputs.device
    if labels is None and batch.shifted:
        labels = batch.inputs if mask is None else batch.inputs.masked_fill(mask == 0, IGNORE)
    labels = None if labels is None else labels.to(device)
    if labels is None or shape is not None:
        assert shape is not None
        counted = torch.ones(shape, dtype=torch.bool, device=device)
    else:
        shape = labels.shape
        if batch.shifted and labels.dim() < 2:
            raise GramianError(f"causal_shift: labels of shape {list(labels.shape)} have no positions; expected [B, T]")
        if batch.shifted:
            last = labels.new_full((*labels.shape[:-1], 1), IGNORE)
            labels = torch.cat([labels[..., 1:], last], dim=-1)
        counted = labels != IGNORE
    if mask is not None and mask.shape == shape and not batch.is_span:
        counted = counted & (mask.to(device) != 0)
    return Positions(counted, labels)


def token_weights(batch: LabelledBatch, found: Positions) -> tuple[Tensor, ...]:
    """Weights of the tokens that layers see, [B, T] or [B, 1]: 1 for positions with a loss term, else 0; (): not known.

    If a sample has one label for all its tokens, a token's weight is that of the sample times its `attention_mask`. Further
    weights are for layers with another number of tokens: those of an encoder, or of an image of another size.
    """
    counted = found.counted
    sample_B1 = counted[:, None].flatten(1).any(1, keepdim=True).double()
    if batch.source_BT is not None:
        whole = bool(counted.all()) and bool((batch.source_BT != 0).all())
        return (sample_B1,) if whole else (counted.double(), (batch.source_BT != 0).double())
    if counted.dim() == 2 and not batch.is_span:
        return (counted.double(),)
    if counted.dim() > 2:
        return (sample_B1,) if bool(counted.all()) else (counted.flatten(1).double(), sample_B1)
    mask = None if batch.mask_BT is None or batch.mask_BT.dim() != 2 else batch.mask_BT.double().to(counted.device)
    if bool(sample_B1.all()):
        return () if mask is None else (mask,)
    return (sample_B1,) if mask is None else (mask * sample_B1,)
