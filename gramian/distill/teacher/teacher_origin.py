"""A fingerprint of the weight files that a cache was made from, to detect other weights without loading them."""

import hashlib
import json
from pathlib import Path

from gramian.core.durable_files import replace_file
from gramian.distill.cache.cache_files import one_line_errors

ORIGIN = "origin.json"
FORMAT = 1
"""Version of the layout of `origin.json`."""
SAMPLES, SAMPLE = 64, 1 << 16
"""Number of places of a weight file that are read for its fingerprint, and bytes that are read at each."""


def fingerprint(files: list[Path]) -> str:
    """Hex hash of the names and sizes of weight files and of the bytes at 64 places of each. Cost: reads 4 MiB per file.

    Weights that were trained further differ everywhere; a change of a single byte may be missed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def write_origin(cache: Path, mark: str) -> None:
    """Write the fingerprint `mark` into a cache's folder, unless it is there already: a finished cache may be read-only."""
    if read_origin(cache) == mark:
        return
    with one_line_errors(cache):
        replace_file(cache / ORIGIN, (json.dumps({"format": FORMAT, "fingerprint": mark}) + "\n").encode())


def read_origin(cache: Path) -> str | None:
    """The fingerprint of the weight files that is stored in a cache's folder; None if there is none."""
    try:
        return str(json.loads((cache / ORIGIN).read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
