"""How long tests wait for something that may never come."""

PATIENCE = 600.0
"""Seconds after which a wait is called a hang: far more than any passing test takes, however busy the machine is."""
