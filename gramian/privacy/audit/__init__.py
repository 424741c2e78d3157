"""Checks at run time of the assumptions on which the privacy guarantee rests."""
