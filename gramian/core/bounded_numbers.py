"""Number types with a range that msgspec checks when a configuration is read.

With `batch: Count = 16` in a dataclass `Options`, `msgspec.convert({"batch": 0}, Options)` fails: expected int >= 1.
"""

from typing import Annotated

import msgspec

LARGEST_INTEGER = 2**31 - 1
"""Upper bound of every integer option: the largest 32-bit index; a larger value is a mistake of the user."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INTEGER)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
