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

    source: Literal["embedded", "text", "jsonl", "tokens"] = "embedded"
    """Kind of data: the embedded corpus, text files, JSONL files or files of token ids."""
    files: tuple[str, ...] = ()
    """Training files, or folders of them, of the kind that `source` names."""
    validation_files: tuple[str, ...] = ()
    """Validation files, or folders of them; none: about 5 % of the documents, selected by a hash of their content;
    the last 5 % of the tokens if there are too few documents for that."""
    field: str = "text"
    """Key of a JSONL object that holds the document's text."""
    user: str = ""
    """Key of a JSONL object that holds the record's user, text or an integer; for privacy.unit = "user" alone."""
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
    isolate: bool = False
    """Hide the packed documents of a window from each other in attention and recurrent state (models GPT and Goose only)."""
    batch: Count = 16
    """Windows per optimizer step, over all processes."""
    micro_batch: Natural = 0
    """Maximum number of windows per backward pass of a process; 0: all windows of the process."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 4
    """Number of processes that prepare batches; 0: the training process prepares them."""
    prefetch: Count = 2
    """Number of steps whose batches each worker prepares ahead."""
