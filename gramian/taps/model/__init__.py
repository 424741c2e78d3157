"""Access to the user's model: its layers and their names, copies of its state to restore, eager runs of compiled modules."""
