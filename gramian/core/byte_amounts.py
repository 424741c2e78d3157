"""Convert byte counts from and to the form that people write, such as "8GB"."""

import math

from gramian.core.errors import GramianError

UNITS = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
"""{unit in capitals: its number of bytes}: "KB" is 1000, "KIB" 1024, and so on up to "TIB"."""


def parse_bytes(field: str, value: int | str | None) -> int | None:
    """The number of bytes that the option `field` sets to `value`: 8000000000, "8GB" or "7.5GiB"; None stays None.

    Raises:
        GramianError: for anything else.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        number = value.strip().rstrip("bBkKmMgGtTiI ")
        unit = value.strip()[len(number) :].strip().upper()
        try:
            found = float(number) * UNITS[unit or "B"]
            if math.isfinite(found) and found >= 0:
                return int(found)
        except (ValueError, KeyError):
            pass
    raise GramianError(f'{field}: expected bytes, such as 8000000000 or "8GB", got {value!r}')


def format_bytes(count: int) -> str:
    """A number of bytes as text for people: "12.34 GB", "12.3 MB", "12.3 KB" below a tenth of a megabyte, or "12 bytes"."""
    if count < 1e5:
        return f"{count / 1e3:.1f} KB" if count >= 1e3 else f"{count} bytes"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
