"""From the data section of a config to windows."""

from gramian.train.config import Data
from gramian.train.data.documents import read_documents
from gramian.train.data.tokenizer import load_tokenizer
from gramian.train.data.windows import Windows


def load_windows(data: Data) -> tuple[Windows, Windows]:
    """The windows to train on and those to validate on.

    Raises:
        GramianError: one line that names the field or the file.
    """
    documents = read_documents(data, load_tokenizer(data.tokenizer))
    training, validation = (
        Windows(stream, data.length, pack=data.pack, isolate=data.isolate, stride=stride)
        for stream, stride in ((documents.train, data.stride), (documents.validation, 0))
    )
    return training, validation
