"""The user's model as capture sees it: its names, its layers, its state, and how to preserve that."""
