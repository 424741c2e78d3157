"""Ask whether a path names a file or a folder: a name that no file can have, such as one that is too long, names none."""

from pathlib import Path


def is_file(path: Path) -> bool:
    """Whether the path names an existing file."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # ValueError: of a name with a zero byte
        return False


def is_folder(path: Path) -> bool:
    """Whether the path names an existing folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
