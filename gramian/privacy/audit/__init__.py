"""Checks at run time that the privacy guarantee rests on."""
