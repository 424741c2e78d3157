"""What a proof assumes of a model's layers, and what else it assumes where it fails under that."""
