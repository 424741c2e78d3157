"""The distillation losses, on logits and on features, and what they report."""
