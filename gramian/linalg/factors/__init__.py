"""Symmetric positive semi-definite factors under one contract, and the decompositions they rest on."""
