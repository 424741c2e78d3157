"""Factors on disk, and the record and log lines of what was done."""
