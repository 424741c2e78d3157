"""Every model type of transformers at a tiny size, and what gramian makes of it: exact, refused, or a bug."""
