"""Read records from Parquet and Arrow files, some rows at a time; needs pyarrow (`pip install 'gramian[data]'`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError
from gramian.data.data_files import unreadable

ROWS = 1024
"""Rows that are Python objects at a time."""


def arrow_groups(path: Path) -> list[int]:
    """About the bytes of each row group of a Parquet file, or of each record batch of an Arrow file; these are read one by one.

    An Arrow stream, as Hugging Face's data sets write them, has no index: it is one group.
    """
    with _opened(path) as file:
        if _is_parquet(path):
            groups = range(file.metadata.num_row_groups)
            return [int(file.metadata.row_group(group).total_byte_size) for group in groups]
        count = getattr(file, "num_record_batches", 1)
        return [path.stat().st_size // count] * count


def arrow_records(
    path: Path, begin: int, stop: int, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (row, as text, {column: value}) of the row groups or record batches `begin` … `stop` - 1; None: all columns.

    Raises:
        GramianError: if the file has no such column, or two of one name, or cannot be read.
    """
    with _opened(path) as file:
        parquet = _is_parquet(path)
        schema = file.schema_arrow if parquet else file.schema
        columns = schema.names if columns is None else columns
        for column in columns:
            if schema.names.count(column) != 1:
                has = "two columns" if column in schema.names else "no"
                raise GramianError(
                    f'{path}: has {has} "{column}" but {", ".join(schema.names)}; expected the columns that data.record reads'
                )
        for group in range(begin, stop):
            if parquet:
                batches = file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[*columns])
            else:
                batches = [file.get_batch(group)] if hasattr(file, "num_record_batches") else iter(file)
            row = 0
            for batch in batches:
                for first in range(0, batch.num_rows, ROWS):
                    for item in batch.select(columns).slice(first, ROWS).to_pylist():
                        yield f"row {row} of group {group}", item
                        row += 1


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file, an Arrow file, or a reader of an Arrow stream."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise GramianError(f"{path}: needs pyarrow; expected gramian[data] installed, or JSONL files") from None
    try:
        if _is_parquet(path):
            with parquet.ParquetFile(path, memory_map=True) as file:
                yield file
            return
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = ipc.open_file(source)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                reader = ipc.open_stream(source)
            yield reader
    except OSError as problem:
        if problem.strerror:
            raise unreadable(path, problem) from None
        raise _damaged(path, problem) from None
    except (pyarrow.ArrowException, UnicodeDecodeError) as problem:
        raise _damaged(path, problem) from None


def _damaged(path: Path, problem: Exception) -> GramianError:
    reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
    return GramianError(f"{path}: is not a complete {kind} file ({reason}); expected one that pyarrow reads")
