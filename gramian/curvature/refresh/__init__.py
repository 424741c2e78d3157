"""Refresh: from the sums of all ranks to new factors in place of the old ones."""
