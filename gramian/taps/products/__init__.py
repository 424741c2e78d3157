"""Products of layers with their weights: which matrices a parameter consists of, and how a layer's own code is watched."""
