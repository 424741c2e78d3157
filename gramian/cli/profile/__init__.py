"""`gramian profile`: the command, and one file per target."""
