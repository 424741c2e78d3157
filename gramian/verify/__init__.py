"""What `gramian verify` and `gramian profile` run: comparisons with independent reference computations, and measurements."""
