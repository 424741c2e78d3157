"""The training loop: steps, schedules, the guard that watches them, and validation."""
