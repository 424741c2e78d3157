"""Turn the content of a record into token ids, and say which of them a model is to predict."""

import json
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError
from gramian.data.corpus.chat_template import ChatTemplate
from gramian.data.tokenizer import HuggingFaceTokenizer, Ids, Tokenizer, token_type

Counted = npt.NDArray[np.bool_]


class RecordEncoder(Protocol):
    """Interface: the content of a record in, its token ids out, with the token that ends a document."""

    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        """Hex hash of what turns a content into tokens."""

    def encode(self, content: bytes) -> tuple[Ids, Counted | None]:
        """Token ids [n] and which of them are targets [n] (None: all); of no ids if the record is empty."""


class TextEncoder:
    """The tokens of a text, and the token that ends a document; all are targets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def digest(self) -> str:
        """Hex hash of the tokenizer."""
        return self.tokenizer.digest

    def encode(self, content: bytes) -> tuple[Ids, Counted | None]:
        """The tokens of a text in UTF-8."""
        ids = self.tokenizer.encode(content)
        return (np.append(ids, ids.dtype.type(self.tokenizer.end)) if len(ids) else ids), None


class CompletionEncoder(TextEncoder):
    """The tokens of a prompt and of its completion, each tokenised by itself; those of the completion and end are targets."""

    def encode(self, content: bytes) -> tuple[Ids, Counted | None]:
        """The tokens of ["prompt", "completion"]; none if the completion is empty."""
        prompt, completion = (self.tokenizer.encode(text) for text in json.loads(content))
        if not len(completion):
            return completion, None
        ids = np.concatenate([prompt, completion, [self.tokenizer.end]]).astype(token_type(self.tokenizer.vocabulary))
        return ids, np.arange(len(ids)) >= len(prompt)


class ChatEncoder:
    """The tokens of a chat as the tokenizer's own template writes it; those that the assistant writes are targets.

    The token that ends a document follows where the template did not end in it; it is no target then.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise GramianError(
                'data.tokenizer: "bytes" has no chat template; expected the folder of a Hugging Face tokenizer with one, '
                'for data.record = "chat"'
            )
        self.tokenizer: HuggingFaceTokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.folder)

    @property
    def digest(self) -> str:
        """Hex hash of the tokenizer and of its template."""
        return f"{self.tokenizer.digest}/{self._template.digest}"

    def encode(self, content: bytes) -> tuple[Ids, Counted | None]:
        """The tokens of a list of messages."""
        found, assistant = self._template.encode(json.loads(content))
        ids, counted = np.asarray(found, token_type(self.tokenizer.vocabulary)), np.asarray(assistant, dtype=bool)
        if ids[-1] == self.tokenizer.end:
            return ids, counted
        return np.append(ids, ids.dtype.type(self.tokenizer.end)), np.append(counted, False)


ENCODERS: dict[str, Any] = {"text": TextEncoder, "completion": CompletionEncoder, "chat": ChatEncoder}
"""{data.record: what encodes it}."""
