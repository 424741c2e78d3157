"""Symmetric positive semi-definite factors behind one interface, and the decompositions that they use."""
