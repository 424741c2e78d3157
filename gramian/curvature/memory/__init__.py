"""Bytes of curvature, planned from shapes before anything is allocated."""
