"""Distillation: a teacher's signal, live or from a cache, and the loss that a student learns it by."""
