"""Bytes and FLOPs that follow from shapes alone."""
