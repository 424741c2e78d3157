"""Checks of a run with [teacher]: the teacher, its cache, and the first distillation loss."""
