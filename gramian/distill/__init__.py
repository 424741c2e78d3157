"""Distillation: a teacher's signal (hidden states, largest logits or samples), live or from a cache, and a student's loss."""

from gramian.distill.loss.fused_loss import distill_loss
from gramian.distill.loss.head import Head
from gramian.distill.loss.loss_metrics import DistillOutput, metrics_of
from gramian.distill.teacher.signal import Tail

__all__ = ["DistillOutput", "Head", "Tail", "distill_loss", "metrics_of"]
