"""Write one shard of a cache: its files, then its record; a file exists under its name only when it is complete."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gramian.core.durable_files import FileRecord, HashedFile, sync_path
from gramian.core.errors import GramianError
from gramian.distill.cache.cache_files import damage
from gramian.distill.cache.layout import CacheLayout
from gramian.distill.cache.manifest import files_from_json, files_to_json, read_json, write_json
from gramian.distill.cache.storage_errors import StorageErrors


@dataclass(frozen=True)
class ShardRecord:
    """Sizes and checksums of a shard's files, and how far stored values are from the teacher's, measured on some windows."""

    files: Mapping[str, FileRecord]
    errors: StorageErrors
    measured_windows: int


def read_shard_record(folder: Path, layout: CacheLayout, shard: int) -> ShardRecord | None:
    """The record of shard number `shard`; None if it has no valid record, or a file is missing or of another size."""
    try:
        body = read_json(folder / layout.record(shard))
    except GramianError:
        return None
    if body is None or set(body["files"]) != set(layout.files(shard).values()):
        return None
    record = ShardRecord(
        files_from_json(body["files"]), StorageErrors.from_json(body["errors"]), body["measured_windows"]
    )
    if any(damage(folder / name, file, content=False) is not None for name, file in record.files.items()):
        return None
    return record


class ShardWriter:
    """Writes the files of one shard of a cache; until `finish` they have temporary names."""

    def __init__(self, folder: Path, layout: CacheLayout, shard: int) -> None:
        """Open the files of shard number `shard` in the cache's folder, and remove the shard's old record."""
        self._folder, self._layout, self._shard = folder, layout, shard
        self._files: dict[str, HashedFile] = {}
        (folder / layout.record(shard)).unlink(missing_ok=True)  # of a shard that was damaged
        for column, name in layout.files(shard).items():
            self._files[column] = HashedFile(folder / name)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Append a batch of windows, {column: values [B, T, width]}, to the shard's files."""
        for column in self._layout.columns:
            self._files[column.name].write(column.pack(values[column.name]))

    def finish(self, errors: StorageErrors, measured_windows: int) -> None:
        """Sync the shard's files and give them their names, then write its record with sizes, checksums and `errors`."""
        names = self._layout.files(self._shard)
        records = {names[column]: file.finish() for column, file in self._files.items()}
        sync_path(self._folder / "shards")
        body = {"files": files_to_json(records), "errors": errors.to_json(), "measured_windows": measured_windows}
        write_json(self._folder / self._layout.record(self._shard), body)

    def abandon(self) -> None:
        """Remove the files of an unfinished shard."""
        for file in self._files.values():
            file.abandon()
