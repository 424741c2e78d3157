"""From a configuration to the parts of a run: model, teacher, optimizer, steppers and memory needs."""
