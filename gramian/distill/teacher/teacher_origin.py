"""Where a cache's teacher came from: enough to see, without loading it, that a folder holds other weights than it did."""

import hashlib
import json
from pathlib import Path

from gramian.distill.cache.cache_files import told_in_one_line, write_whole

ORIGIN = "origin.json"
SAMPLES, SAMPLE = 64, 1 << 16
"""Places of a file that are read, and bytes of each."""


def fingerprint(files: list[Path]) -> str:
    """Hex hash of the files' names and sizes and of what stands at 64 places of each. Cost: 4 MiB a file.

    Weights that were trained further differ everywhere; a single byte that differs may be missed.
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
    """Beside a cache's manifest, unless it is there already: a finished cache may lie where nothing can be written.

    Raises:
        GramianError: one line on what the disk refused.
    """
    if read_origin(cache) == mark:
        return
    with told_in_one_line(cache):
        write_whole(cache / ORIGIN, (json.dumps({"fingerprint": mark}) + "\n").encode())


def read_origin(cache: Path) -> str | None:
    """What was written; None: nothing was."""
    try:
        return str(json.loads((cache / ORIGIN).read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
