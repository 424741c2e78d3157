"""Measurements behind `gramian profile`: seconds and memory of private steps, of K-FAC and of training steps."""
