"""Distillation losses on logits and on features, and their metrics."""
