"""The doctor: checks of a run before it starts. `examine` runs them; each file of `checks/` and `teacher/` is one check."""
