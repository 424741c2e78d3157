"""The row proof: that what the taps attribute to a sample depends on that sample alone."""
