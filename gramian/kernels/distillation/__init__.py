"""Kernels for the distillation loss over rows of logits."""
