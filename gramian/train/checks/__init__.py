"""What `gramian doctor` looks at before a run, one concept a file; `gramian.train.doctor` calls them in order."""
