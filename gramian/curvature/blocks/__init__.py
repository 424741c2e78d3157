"""Blocks of the Fisher: which parameters share one, how each is represented, damped and multiplied."""
