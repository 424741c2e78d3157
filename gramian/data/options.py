"""Options of the data pipeline: which documents are read, and how they are cut into windows and batches."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from gramian.core.bounded_numbers import Count, Natural


@dataclass(frozen=True)
class DataSection:
    """Data of a run: section `[data]` of its configuration.

    Example:
        >>> DataSection(source="text", files=("corpus/",), length=256).batch
        16
    """

    source: Literal["embedded", "text", "jsonl", "parquet", "arrow", "tokens"] = "embedded"
    """Kind of data: the embedded corpus, text files, JSONL, Parquet or Arrow files, or files of token ids."""
    files: tuple[str, ...] = ()
    """Training files, folders of them or patterns such as "corpus/**/*.jsonl", of the kind that `source` names."""
    validation_files: tuple[str, ...] = ()
    """Validation files, or folders of them; none: about 5 % of the documents, selected by a hash of their content;
    the last 5 % of the tokens if there are too few documents for that."""
    record: Literal["text", "completion", "chat"] = "text"
    """What a record of JSONL, Parquet or Arrow files holds: a text; a "prompt" and a "completion", which alone is predicted; or
    messages, of which those of the assistant are predicted, written by the tokenizer's chat template."""
    field: str = "text"
    """Key of a record's text, or of a chat's messages, where "text" stands for "messages"."""
    user: str = ""
    """Key of a JSONL object that holds the record's user, text or an integer; for privacy.unit = "user" alone."""
    cache: str = "runs/tokens"
    """Folder that keeps the tokens of corpora of 32 MiB and more, and what `gramian cache --tokens` writes; "": none."""
    tokenizer: str = "auto"
    """Tokenizer: "bytes", the folder of a Hugging Face tokenizer, or "auto", the tokenizer in model.path if there is one."""
    limit_bytes: Count = 8_000_000
    """Maximum size of the embedded corpus in bytes."""
    length: Count = 128
    """Number of predicted tokens per window."""
    stride: Natural = 0
    """Tokens between the starts of consecutive training windows; 0: data.length, so that no token is predicted twice."""
    pack: bool = True
    """Concatenate documents before cutting windows; false: a window contains tokens of one document and padding."""
    truncate: bool = False
    """Leave out what a document has beyond its first window, with pack = false; else it continues in further windows."""
    isolate: bool = False
    """Hide the packed documents of a window from each other in attention and recurrent state (positions restart)."""
    batch: Count = 16
    """Windows per optimizer step, over all processes."""
    micro_batch: Natural = 0
    """Maximum number of windows per backward pass of a process; 0: all windows of the process."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 4
    """Number of processes that prepare batches; 0: the training process prepares them."""
    prefetch: Count = 2
    """Number of steps whose batches each worker prepares ahead."""
