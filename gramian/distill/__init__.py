"""Distillation: a teacher's signal, live or from a cache, and the loss that a student learns it by."""

from gramian.distill.head import Head
from gramian.distill.loss import distill_loss
from gramian.distill.metrics import DistillOutput, metrics_of
from gramian.distill.signal import Tail

__all__ = ["DistillOutput", "Head", "Tail", "distill_loss", "metrics_of"]
