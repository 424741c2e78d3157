"""Differentially private training: clipped gradient sums, Poisson-sampled batches, secret noise and the account of ε."""

from gramian.privacy.engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
