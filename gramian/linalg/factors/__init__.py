"""Symmetric positive semi-definite matrices ("factors"): several representations, one interface, their decompositions."""
