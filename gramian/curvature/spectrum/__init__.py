"""Spectra of the estimated Fisher and the capacity metrics computed from them."""
