"""The state of a run in memory and on disk: snapshots, checkpoints, run folder, metrics and record."""
