"""What a run measures beside its loss: noise scale and health of layers, and where a value first was not finite."""
