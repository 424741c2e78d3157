"""Persistence: factors on disk, the record of a computation, and its log lines."""
