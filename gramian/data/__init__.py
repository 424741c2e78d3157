"""The data of a run: documents become a stream of tokens, the stream becomes windows, a seed and a position name a batch.

`load_windows` → `Batches`. Nothing here keeps a state that a resumed run would have to restore.
"""

from gramian.data.batches import Batches, DataWorkerDied, StepBatch
from gramian.data.documents import Documents, read_documents, read_stream
from gramian.data.load_windows import load_windows
from gramian.data.starvation import StarvationMeter
from gramian.data.tokenizer import Tokenizer, load_tokenizer
from gramian.data.windows import Windows

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
