"""Student and distillation loss as one module, so that DDP wraps both and reduces every gradient.

Legend: B windows, T tokens, N = B·T, D width of the student, E of the teacher, V vocabulary.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.dtypes import wide_dtype
from gramian.distill.loss.feature_loss import FeatureLoss
from gramian.distill.loss.features import debiased_cka
from gramian.distill.loss.fused_loss import distill_loss
from gramian.distill.loss.head import Head
from gramian.distill.loss.loss_metrics import SUMS
from gramian.distill.teacher.head_proof import head_of
from gramian.distill.teacher.language_model import hidden_of, linear_of
from gramian.distill.teacher.signal import DenseSignal, SampledSignal, Signal, SparseSignal, refuse_inference
from gramian.kernels.distillation.distill_rows import RowObjective

IGNORED = -100
"""Target of tokens that have no loss."""
REPORTED_SUMS = ("nats", *SUMS, "feature_loss")
"""Names of the sums that `DistillObjective` returns: sums over tokens, and last the feature loss times the number of tokens."""


class DistillObjective(nn.Module):
    """A student with its distillation loss: kd_weight · T² · D(teacher, student) + ce_weight · CE, plus a loss on features.

    T is the temperature, D the divergence of the two distributions, CE the cross entropy with the targets; features are the
    residual streams of some layers.
    """

    def __init__(self, model: nn.Module, objective: RowObjective, features: FeatureLoss | None = None) -> None:
        """Wrap a student, and test that its logits are those of its linear head with a known scale and soft cap.

        Args:
            model: the student: GPT, Goose or a Hugging Face causal language model, on its device.
            objective: weights and direction of the loss.
            features: loss on the residual stream of some layers, with projectors that are trained too; None: no such loss.

        Raises:
            GramianError: if the student's logits are not those of a linear head.
        """
        super().__init__()
        self.model, self.features, self._objective = model, features, objective
        found = head_of(model)
        self._scale, self._softcap = found.scale, found.softcap

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        coefficient: float,
        documents_BT: Tensor | None = None,
        signal: Signal | None = None,
        temperature: Tensor | float = 1.0,
        feature_weight: float = 0.0,
        compare: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch to call backward on, and sums for metrics.

        Args:
            tokens_BT: token ids.
            targets_BT: the token that follows each one, or −100 where there is no loss.
            coefficient: factor of one token's loss in the first result, above 0.
            documents_BT: document of each token, for models that keep documents apart; None: one document per window.
            signal: the teacher's signal; None: the loss is the cross entropy alone, as for evaluation.
            temperature: T of the divergence.
            feature_weight: factor of the loss on features; 0: it is not computed.
            compare: return the CKA with the teacher's final hidden states (a `DenseSignal`) in place of a loss.

        Returns:
            The loss, and the sums named by REPORTED_SUMS, float64 and without a graph. Without a signal the second result is
            Σ −log p(target) alone. With `compare`, both results are the debiased CKA of the student's final hidden states with
            the teacher's.
        """
        # Also while the weight is 0: a compiled forward does not see hooks that are added later.
        layers = () if self.features is None else self.features.student_layers
        hidden_BTD, streams = hidden_of(self.model, tokens_BT, documents_BT, layers)
        if compare:
            assert isinstance(signal, DenseSignal)
            counted_N = (targets_BT != IGNORED).flatten()
            dtype = wide_dtype(hidden_BTD, signal.hidden_BTD)
            x_ND, y_NE = (hidden.flatten(0, 1).to(dtype) for hidden in (hidden_BTD, signal.hidden_BTD))
            similarity = debiased_cka(x_ND, y_NE, counted_N)
            return similarity, similarity
        linear = linear_of(self.model)
        head = Head(linear.weight, linear.bias, self._scale, self._softcap)
        student = (hidden_BTD.flatten(0, 1), head, targets_BT.flatten())
        terms = 1.0 / coefficient
        if signal is None:
            plain = distill_loss(*student, kd_weight=0.0, ce_weight=1.0, ignore_index=IGNORED, num_terms=terms)
            return plain.loss, plain.sums[SUMS.index("ce")]
        options = {**_teacher_of(signal), **asdict(self._objective), "num_terms": terms}
        out = distill_loss(*student, temperature=temperature, **options)
        loss, extra = out.loss, torch.zeros((), dtype=torch.float64, device=out.sums.device)
        if self.features is not None and not feature_weight:  # DDP waits for the gradient of every parameter
            loss = loss + sum((0.0 * p.sum() for p in self.features.parameters()), start=loss.new_zeros(()))
        elif self.features is not None:
            counted_BT = targets_BT != IGNORED
            refuse_inference(signal)
            distance = self.features(streams, signal.layers, counted_BT) * counted_BT.sum()
            loss = loss + (feature_weight * coefficient) * distance
            extra = distance.detach().to(torch.float64)
        nats = out.sums[SUMS.index("ce")]
        return loss, torch.cat([nats[None], out.sums, extra[None]])


def _teacher_of(signal: Signal) -> dict[str, Any]:
    """Convert a teacher's signal to keyword arguments of `distill_loss`, with batch and time flattened to N tokens."""
    match signal:
        case DenseSignal():
            return {"teacher_hidden": signal.hidden_BTD.flatten(0, 1), "teacher_weight": signal.head}
        case SparseSignal():
            rows = signal.tokens()
            return {"teacher_topk": (rows.ids_BTK, rows.logits_BTK, rows.tail)}
        case SampledSignal():
            return {"teacher_sampled": (signal.ids_BTK.flatten(0, 1), signal.weights_BTK.flatten(0, 1))}
