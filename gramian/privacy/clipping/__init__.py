"""Exact per-sample clipping: the plan of a backward, the gradient rule, and the clipped sums until the optimizer step."""
