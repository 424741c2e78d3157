"""Linear algebra that every other room stands on."""
