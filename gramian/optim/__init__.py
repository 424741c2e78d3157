"""Optimizers, and hooks on optimizers, that use the captured curvature."""
