"""Poisson sampling: draws of records determined by a secret key, and the loader that yields them as batches."""
