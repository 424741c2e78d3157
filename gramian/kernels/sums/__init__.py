"""Kernels for sums over tokens and for weighted sums over samples."""
