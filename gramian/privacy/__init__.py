"""Exact differentially private training."""
