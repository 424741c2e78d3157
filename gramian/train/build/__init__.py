"""Build the parts of a run from its configuration: model, teacher, optimizer, stepper, and memory needs."""
