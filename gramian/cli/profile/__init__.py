"""`gramian profile`: the command, and one file for each of its targets clipping, kfac and train."""
