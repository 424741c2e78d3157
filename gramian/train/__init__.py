"""Training: configuration, building a run from it, the loop, its state on disk, and checks of a run before it starts."""
