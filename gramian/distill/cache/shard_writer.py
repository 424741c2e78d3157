"""Writing one shard: its files, then its record, each there whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gramian.distill.cache.cache_files import HashedFile, sync_folder
from gramian.distill.cache.layout import CacheLayout
from gramian.distill.cache.manifest import write_json
from gramian.distill.cache.storage_errors import Errors


class ShardWriter:
    """A shard under way.

    Args:
        folder: of the cache.
        layout: of its files.
        shard: which.
    """

    def __init__(self, folder: Path, layout: CacheLayout, shard: int) -> None:
        self._folder, self._layout, self._shard = folder, layout, shard
        self._files: dict[str, HashedFile] = {}
        (folder / layout.record(shard)).unlink(missing_ok=True)  # of a shard that was damaged
        for column, name in layout.files(shard).items():
            self._files[column] = HashedFile(folder / name)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Append windows: {column: [B, T, width]}."""
        for column in self._layout.columns:
            self._files[column.name].write(column.pack(values[column.name]))

    def finish(self, errors: Errors, measured_windows: int) -> None:
        """Give the files their names, and write the record once those will last."""
        names = self._layout.files(self._shard)
        records = {names[column]: file.finish() for column, file in self._files.items()}
        sync_folder(self._folder / "shards")
        body = {
            "files": {name: [record.bytes, record.sha256] for name, record in records.items()},
            "errors": errors.plain(),
            "measured_windows": measured_windows,
        }
        write_json(self._folder / self._layout.record(self._shard), body)

    def abandon(self) -> None:
        """Leave nothing of an unfinished shard."""
        for file in self._files.values():
            file.abandon()
