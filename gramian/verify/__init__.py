"""Oracles in plain torch, and the runs that compare the library with them.

An oracle imports torch and no other room of the package, so that agreement with it is evidence.
"""
