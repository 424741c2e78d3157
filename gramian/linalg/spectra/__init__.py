"""Spectra of symmetric operators that are known only by their matrix-vector products."""
