"""What `gramian doctor` checks before a run: one check per file, called in order by `examine`."""
