"""`gramian.check`: what of a user's own model is exact, approximated, coupled or refused; also for a model folder."""
