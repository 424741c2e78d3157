"""The data of a run: documents become a stream of tokens, the stream becomes windows, a seed and a position name a batch.

`load_windows` → `Batches`. Nothing here keeps a state that a resumed run would have to restore.
"""

from gramian.train.data.batches import Batches, DataWorkerDied, StepBatch
from gramian.train.data.documents import Documents, read_documents, read_stream
from gramian.train.data.load import load_windows
from gramian.train.data.starvation import StarvationMeter
from gramian.train.data.tokenizer import Tokenizer, load_tokenizer
from gramian.train.data.windows import Windows

__all__ = [
    "Batches",
    "DataWorkerDied",
    "Documents",
    "StarvationMeter",
    "StepBatch",
    "Tokenizer",
    "Windows",
    "load_tokenizer",
    "load_windows",
    "read_documents",
    "read_stream",
]
