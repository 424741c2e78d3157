"""The files of a teacher's cache must be undamaged, and its rows must be what the teacher computes now."""

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.distill.cache.reader import Cache
from gramian.distill.cache.row_check import check_rows
from gramian.train.build import build_teacher
from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun


def cache_files(cache: Cache) -> Check:
    """Verify the checksum of every file of a teacher's cache; reads all of them once, at one or two GB per second."""
    size = sum(record.bytes for record in cache.manifest.files.values())
    try:
        count = cache.verify()
    except GramianError as problem:
        return Check("cache files", "damaged", "checksums", False, str(problem))
    return Check("cache files", f"{count} files, {format_bytes(size)}", "checksums", True, value=float(count))


def cache_rows(run: ExaminedRun, cache: Cache) -> Check:
    """Check random rows of a teacher's cache against what the live teacher computes for the same windows."""
    config = run.config
    assert config.teacher is not None
    if not config.teacher.path:
        return Check("cache = teacher", "not compared", "-", True, "set teacher.path to compare some rows")
    live = build_teacher.live_teacher(config, run.grid, run.numbers, run.windows)
    found = check_rows(cache, live, run.windows, seed=config.run.seed)
    measured = ", ".join(f"{name} {value:.2g}" for name, value in found.worst.items())
    bound = ", ".join(f"{name} {2 * found.stated.get(name, 0.0) + 1e-3:.2g}" for name in found.worst)
    hint = "" if found.holds() else "the cache is not of this teacher and data: gramian cache into another folder"
    return Check("cache = teacher", measured, bound, found.holds(), hint, max(found.worst.values(), default=0.0))
