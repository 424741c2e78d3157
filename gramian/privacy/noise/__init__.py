"""Secret keys, release counters and the Gaussian noise they determine."""
