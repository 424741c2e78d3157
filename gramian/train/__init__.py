"""Training: config, building a run from it, the loop, its state on disk, and the doctor that checks a config before it runs."""
