"""Layers whose weights only enter products and sums of rows: their gradients come from the inputs and outputs of those."""
