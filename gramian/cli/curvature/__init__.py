"""`gramian curvature`: the command and its tables."""
