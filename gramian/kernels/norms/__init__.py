"""Kernels for the squared norms of per-sample gradients."""
