"""Differentially private training: clipped sums, Poisson draws, secret noise and the account of ε."""

from gramian.privacy.clipping.clipping_rule import Tuning
from gramian.privacy.engine import PrivacyEngine

__all__ = ["PrivacyEngine", "Tuning"]
