"""The data of a run: documents become a stream of tokens, the stream is cut into windows, and windows form batches.

`load_windows` → `Batches`. A batch is a function of the seed and of its data position (its index in the run's sequence of
batches), so a resumed run has no data state to restore.
"""

from gramian.data.batches import Batches, DataWorkerDied, StepBatch
from gramian.data.documents import Documents, read_documents, read_stream
from gramian.data.load_windows import load_windows
from gramian.data.starvation import StarvationMeter
from gramian.data.tokenizer import Tokenizer, load_tokenizer
from gramian.data.windows import Windows

__all__ = [
    "Batches", "DataWorkerDied", "Documents", "StarvationMeter", "StepBatch", "Tokenizer", "Windows", "load_tokenizer",
    "load_windows", "read_documents", "read_stream",
]  # fmt: skip
