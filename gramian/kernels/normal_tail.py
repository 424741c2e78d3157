"""Constants of the normals from ChaCha20: which Box–Muller pairs use 32 further random bits for the radius, and from where."""

import math

NORMALS_VERSION = 2
"""Version of the map from (key, nonce, position) to normals. 1: radii of 32 random bits; 2: of 64 random bits in the tail."""

TAIL_WORDS = 2**16
"""Box–Muller pairs whose first 32-bit word is below this use 32 further bits: one pair in 65,536, of radius 4.71 or more."""

TAIL_NONCE = 2**95
"""Added to the nonce to get the key stream of the further bits in the tail; nonces of normals are below it."""

BOUND = math.sqrt(130 * math.log(2))
"""Largest absolute value of a normal: √(-2 ln 2⁻⁶⁵) ≈ 9.49, of the smallest uniform number 2⁻⁶⁵. A radius beyond
√(-2 ln 2⁻⁶⁴) ≈ 9.42 has probability 2⁻⁶⁴, as in the exact distribution.
"""
