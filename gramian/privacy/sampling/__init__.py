"""Poisson sampling: keyed draws, and the loader that yields them."""
