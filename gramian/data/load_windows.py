"""Read the documents of a config and cut them into training and validation windows."""

from gramian.data.documents import Documents, read_documents
from gramian.data.options import DataSection
from gramian.data.token_store.build_store import Progress, no_progress
from gramian.data.tokenizer import load_tokenizer
from gramian.data.windows import Windows


def load_windows(data: DataSection, progress: Progress = no_progress) -> tuple[Windows, Windows]:
    """Read and tokenise the documents of a config and cut them into windows; returns (training, validation) windows.

    `progress` is called while a large corpus is tokenised.

    Example:
        >>> training, validation = load_windows(DataSection(limit_bytes=200_000, length=64))

    Raises:
        GramianError: one line that names the field or the file.
    """
    return cut_windows(read_documents(data, load_tokenizer(data.tokenizer), progress), data)


def cut_windows(documents: Documents, data: DataSection) -> tuple[Windows, Windows]:
    """Cut tokenised documents into (training, validation) windows by `data.length`; raises if either split has no window."""
    training, validation = (
        Windows(stream, data.length, pack=data.pack, isolate=data.isolate, stride=stride, truncate=data.truncate)
        for stream, stride in ((documents.train, data.stride), (documents.validation, 0))
    )
    validation.held_out = documents.held_out
    return training, validation
