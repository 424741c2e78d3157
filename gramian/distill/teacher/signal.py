"""What a teacher says about a batch: the one type that live models and caches both give.

Legend: B windows, T tokens, D the teacher's width, V vocabulary, K ids kept of a token, Q knots of the tail curve.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.loss.head import Head


@dataclass(frozen=True)
class DenseSignal:
    """The whole distribution, at every temperature: final hidden states and the head that reads them."""

    hidden_BTD: Tensor
    """After the final norm."""
    head: Head
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, T, D] after some blocks, for losses on features."""


@dataclass(frozen=True)
class Tail:
    """The ids that were not kept, as two curves over u = 1/T: l(u) = log Σ exp(u z) and its slope l'(u), the mean of z."""

    values_BTQ: Tensor
    """l at the knots, float32."""
    slopes_BTQ: Tensor
    """l' at the knots, float32."""
    knots_Q: Tensor
    """u, ascending, float32."""


@dataclass(frozen=True)
class SparseSignal:
    """The largest logits, and curves for the rest; without a tail the kept ids hold all mass."""

    ids_BTK: Tensor
    logits_BTK: Tensor
    tail: Tail | None
    layers: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledSignal:
    """An unbiased estimate of the distribution at one temperature: ids drawn from it, with weights that sum to 1."""

    ids_BTK: Tensor
    weights_BTK: Tensor
    temperature: float
    layers: Mapping[int, Tensor] = field(default_factory=dict)


Signal = DenseSignal | SparseSignal | SampledSignal


class SignalSource(Protocol):
    """A teacher: live, or read from a cache."""

    def __call__(self, batch: Mapping[str, Tensor]) -> Signal:
        """The signal of a micro-batch: "tokens" [B, T], "windows" [B] (rows of a cache), maybe "documents" [B, T]."""
        ...


def tensors_of(signal: Signal) -> Iterator[Tensor]:
    """Every tensor that belongs to the batch: not the head, not the knots."""
    match signal:
        case DenseSignal():
            yield signal.hidden_BTD
        case SparseSignal():
            yield from (signal.ids_BTK, signal.logits_BTK)
            if signal.tail is not None:
                yield from (signal.tail.values_BTQ, signal.tail.slopes_BTQ)
        case SampledSignal():
            yield from (signal.ids_BTK, signal.weights_BTK)
    yield from signal.layers.values()


def refuse_inference(signal: Signal) -> None:
    """Called before anything learns from a signal: autograd cannot save tensors of `torch.inference_mode`.

    Raises:
        GramianError: if one of them is such a tensor.
    """
    whole = [signal.head.weight_VD] if isinstance(signal, DenseSignal) else []
    if any(tensor.is_inference() for tensor in (*tensors_of(signal), *whole)):
        raise GramianError(
            "teacher: its signal was made in inference mode, nothing can learn from it; expected no_grad"
        )
