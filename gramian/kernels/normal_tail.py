"""The tail of keyed normal numbers: which pairs of words take 32 further bits for their radius, and from where."""

import math

NORMALS_VERSION = 2
"""Changes whenever a (key, nonce, place) gives another normal number. 1: 32-bit radii; 2: 64 bits in the tail."""

TAIL_WORDS = 2**16
"""Pairs whose first word is below this take 32 further bits: one pair in 65,536, from |x| = 4.71 on."""

TAIL_NONCE = 2**95
"""Added to the nonce of the stream that those bits come from; nonces of normals are below it."""

BOUND = math.sqrt(130 * math.log(2))
"""No normal number is larger: √(-2 ln 2⁻⁶⁵) ≈ 9.49. Radii beyond √(-2 ln 2⁻⁶⁴) ≈ 9.42 have probability 2⁻⁶⁴, as they should."""
