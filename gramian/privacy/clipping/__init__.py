"""Exact per-sample clipping: the plan, the gradient rule, and the sums on their way to the optimizer."""
