"""From the data section of a config to windows."""

from gramian.data.documents import Documents, read_documents
from gramian.data.tokenizer import load_tokenizer
from gramian.data.windows import Windows
from gramian.train.config.config import DataSection


def load_windows(data: DataSection) -> tuple[Windows, Windows]:
    """The windows to train on and those to validate on.

    Raises:
        GramianError: one line that names the field or the file.
    """
    return cut(read_documents(data, load_tokenizer(data.tokenizer)), data)


def cut(documents: Documents, data: DataSection) -> tuple[Windows, Windows]:
    """Documents as the windows to train on and those to validate on.

    Raises:
        GramianError: if a side makes no window.
    """
    training, validation = (
        Windows(stream, data.length, pack=data.pack, isolate=data.isolate, stride=stride)
        for stream, stride in ((documents.train, data.stride), (documents.validation, 0))
    )
    return training, validation
