"""Estimation: from captured inputs and output gradients to the sums of one refresh."""
