"""What `gramian verify` and `gramian profile` run: comparisons with the oracles, and measurements."""
