"""The signal of a teacher for one batch: the types that live teachers and caches return.

Legend: B windows, T tokens, D the teacher's width, V vocabulary, K stored ids of a token, Q knots of the tail curve.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.distill.loss.head import Head


@dataclass(frozen=True)
class DenseSignal:
    """A teacher's full distribution at every temperature, as its final hidden states and its head."""

    hidden_BTD: Tensor
    """Final hidden states, after the final norm."""
    head: Head
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    """{layer: residual stream [B, T, D] after that transformer block, 0: embedding}, for losses on features."""


@dataclass(frozen=True)
class Tail:
    """Mass of the ids outside the top k: l(u) = log Σ exp(u z) over their logits z, and its slope l'(u), at some u = 1/T.

    Example:
        >>> knots = torch.tensor([0.2, 0.6, 1.0])
        >>> tail = Tail(torch.zeros(4, 3), torch.zeros(4, 3), knots)  # 4 tokens
    """

    values_BTQ: Tensor
    """l(u) = log Σ exp(u z) over the logits z outside the top k, at the knots u = 1/T, float32."""
    slopes_BTQ: Tensor
    """Derivative of l(u) = log Σ exp(u z) with respect to u at the knots, float32."""
    knots_Q: Tensor
    """The knots: values of u = 1/T at which the curve is stored, ascending, float32."""


@dataclass(frozen=True)
class SparseSignal:
    """A teacher's K largest logits per token, and a curve for the mass of all other ids; tail None: the K ids have all mass."""

    ids_BTK: Tensor
    logits_BTK: Tensor
    tail: Tail | None
    layers: Mapping[int, Tensor] = field(default_factory=dict)

    def tokens(self, chosen: slice = slice(None)) -> "SparseSignal":
        """The signal of the tokens `chosen`, with batch and time flattened to one dimension [N, …], and without layers."""
        tail = self.tail
        if tail is not None:
            tail = Tail(tail.values_BTQ.flatten(0, 1)[chosen], tail.slopes_BTQ.flatten(0, 1)[chosen], tail.knots_Q)
        return SparseSignal(self.ids_BTK.flatten(0, 1)[chosen], self.logits_BTK.flatten(0, 1)[chosen], tail)


@dataclass(frozen=True)
class SampledSignal:
    """An unbiased estimate of a teacher's distribution at one temperature: ids drawn from it, and weights that sum to 1."""

    ids_BTK: Tensor
    weights_BTK: Tensor
    temperature: float
    layers: Mapping[int, Tensor] = field(default_factory=dict)


Signal = DenseSignal | SparseSignal | SampledSignal


class SignalSource(Protocol):
    """A callable that returns the teacher's signal of a micro-batch: a live teacher, or a cache."""

    def __call__(self, batch: Mapping[str, Tensor]) -> Signal:
        """The teacher's signal of a micro-batch: "tokens" [B, T], "windows" [B] (rows of a cache), maybe "documents" [B, T]."""


def tensors_of(signal: Signal) -> Iterator[Tensor]:
    """Yield the tensors of a signal that have a batch dimension: all but the head and the knots."""
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
    """Raise `GramianError` if a signal has tensors of `torch.inference_mode`, which autograd cannot save."""
    head = [signal.head.weight_VD] if isinstance(signal, DenseSignal) else []
    if any(tensor.is_inference() for tensor in (*tensors_of(signal), *head)):
        raise GramianError(
            "teacher: its signal was made in inference mode, nothing can learn from it; expected no_grad"
        )
