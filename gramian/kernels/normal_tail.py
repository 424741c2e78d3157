"""The tail of keyed normal numbers: which Box–Muller pairs take 32 further random bits for their radius, and from where."""

import math

NORMALS_VERSION = 2
"""Version of the normals; changes when a (key, nonce, place) gives another number. 1: 32-bit radii; 2: 64 bits in the tail."""

TAIL_WORDS = 2**16
"""Box–Muller pairs whose first word is below this take 32 further bits: one pair in 65,536, from |x| = 4.71 on."""

TAIL_NONCE = 2**95
"""Added to the nonce to get the stream of the further bits of tail pairs; nonces of normals are below it."""

BOUND = math.sqrt(130 * math.log(2))
"""Largest absolute value of a normal: √(-2 ln 2⁻⁶⁵) ≈ 9.49. One beyond √(-2 ln 2⁻⁶⁴) ≈ 9.42 has probability 2⁻⁶⁴, as it should.
"""
