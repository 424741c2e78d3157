"""One check per file: a function from an `ExaminedRun` to a list of `Check`, listed in `gramian.train.doctor.examine`."""
