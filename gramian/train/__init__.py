"""Training: data and loops."""
