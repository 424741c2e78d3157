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
    """Bytes of each row group of a Parquet file, or of each record batch of an Arrow file; these are read one by one."""
    with _opened(path) as file:
        if path.suffix == ".parquet":
            groups = range(file.metadata.num_row_groups)
            return [int(file.metadata.row_group(group).total_byte_size) for group in groups]
        if hasattr(file, "num_record_batches"):
            return [int(file.get_batch(number).nbytes) for number in range(file.num_record_batches)]
        return [sum(int(batch.nbytes) for batch in file)]  # an Arrow stream has no index: it is read from its beginning


def arrow_records(
    path: Path, begin: int, stop: int, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row of the file, {column: value}) of the row groups or record batches `begin` … `stop` - 1; None: all columns.

    Raises:
        GramianError: if the file has no such column, or cannot be read.
    """
    with _opened(path) as file:
        parquet = path.suffix == ".parquet"
        schema = file.schema_arrow if parquet else file.schema
        columns = schema.names if columns is None else columns
        missing = [column for column in columns if column not in schema.names]
        if missing:
            raise GramianError(
                f'{path}: has no "{missing[0]}" but {", ".join(schema.names)}; expected the columns that data.record reads'
            )
        if parquet:
            row = sum(file.metadata.row_group(group).num_rows for group in range(begin))
            batches = file.iter_batches(batch_size=ROWS, row_groups=[*range(begin, stop)], columns=[*columns])
        elif hasattr(file, "num_record_batches"):
            row = sum(file.get_batch(number).num_rows for number in range(begin))
            batches = (file.get_batch(number) for number in range(begin, stop))
        else:
            row, batches = 0, iter(file)
        for batch in batches:
            for first in range(0, batch.num_rows, ROWS):
                rows = batch.select(columns).slice(first, ROWS).to_pylist()
                yield from enumerate(rows, row + first)
            row += batch.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file, an Arrow file, or a reader of an Arrow stream, as Hugging Face's data sets write them."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise GramianError(f"{path}: needs pyarrow; expected gramian[data] installed, or JSONL files") from None
    try:
        if path.suffix == ".parquet":
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
    except pyarrow.ArrowException as problem:
        raise _damaged(path, problem) from None


def _damaged(path: Path, problem: Exception) -> GramianError:
    reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
    return GramianError(f"{path}: is not a complete {kind} file ({reason}); expected one that pyarrow reads")
