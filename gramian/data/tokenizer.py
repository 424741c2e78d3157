"""Convert text to token ids and back: bytes, or a Hugging Face tokenizer from a folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gramian.core.errors import GramianError
from gramian.core.existing_paths import is_folder

Ids = npt.NDArray[Any]
"""A 1-D array of token ids, of any integer type."""

# Files of a tokenizer's folder that determine its ids; the folder may also contain weights.
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
_SUFFIXES = (".model", ".tiktoken")


class Tokenizer(Protocol):
    """Interface of a tokenizer in the data pipeline."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including the end-of-document id."""

    @property
    def end(self) -> int:
        """Id of the token that ends a document; no text is encoded to it."""

    @property
    def digest(self) -> str:
        """Hex hash of the tokenizer; equal digests mean equal ids for equal text."""

    def encode(self, text: str | bytes) -> Ids:
        """Return the token ids of a text, [n] of `token_type(vocabulary)`; a text in bytes is UTF-8."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of token ids, without the end id; invalid UTF-8 is replaced."""

    def text_bytes(self, ids: Ids) -> int:
        """Return the number of UTF-8 bytes of the text that token ids stand for, without the end id."""


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Dtype in which token ids are stored: uint16 if it can represent every id below `vocabulary`, else uint32."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer: "bytes" and "auto" give the byte tokenizer, any other name is a Hugging Face tokenizer's folder.

    Example:
        >>> load_tokenizer("bytes").encode("hi").tolist()
        [104, 105]

    Raises:
        GramianError: if there is no such folder, or it has no tokenizer.
    """
    return ByteTokenizer() if name in ("auto", "bytes") else HuggingFaceTokenizer(name)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has the vocabulary file of a tokenizer; the file's content is checked when it is read."""
    vocabularies = ("tokenizer.json", "vocab.json", "vocab.txt")
    return any(path.name in vocabularies or path.suffix in _SUFFIXES for path in folder.iterdir())


class ByteTokenizer:
    """Tokenizer whose tokens are bytes; id 256 ends a document."""

    vocabulary = 257
    end = 256
    digest = hashlib.blake2b(b"bytes", digest_size=16).hexdigest()

    def encode(self, text: str | bytes) -> Ids:
        """Return the UTF-8 bytes of a text as token ids, uint16 [n]."""
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, dtype=np.uint8).astype(token_type(self.vocabulary))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of token ids that are bytes; the end id is left out, and invalid UTF-8 is replaced."""
        return bytes(int(token) for token in ids if token != self.end).decode(errors="replace")

    def text_bytes(self, ids: Ids) -> int:
        """Return the number of token ids that are bytes."""
        return int((ids != self.end).sum())


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer from a local folder; nothing is downloaded and no code of the folder is run.

    A document that spells a special token, such as "<|endoftext|>", is encoded as that spelling: text cannot end a document.
    `encode` creates a Python list of one document's ids; a document of gigabytes is better pre-tokenised.

    Raises:
        GramianError: if `folder` has no readable tokenizer with a vocabulary and an end-of-text token, or transformers is not
            installed.

    Example:
        >>> HuggingFaceTokenizer("models/gpt2").encode("hello")
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if not is_folder(folder):
            raise GramianError(
                f'data.tokenizer: {folder} is not a folder; expected "bytes" or the folder of a Hugging Face tokenizer'
            )
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise GramianError(
                f'data.tokenizer: {folder} needs transformers; expected gramian[hf] installed, or "bytes"'
            ) from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, split_special_tokens=True
            )
        except Exception as problem:  # the library raises many types
            reason = (str(problem).splitlines() or [type(problem).__name__])[0].strip()
            raise GramianError(
                f"data.tokenizer: {folder} has no readable tokenizer ({reason}); expected tokenizer.json"
            ) from None
        # The library builds a tokenizer of special tokens alone from a folder without a vocabulary.
        if len(self._tokenizer) <= len(set(self._tokenizer.all_special_ids)):
            raise GramianError(f"data.tokenizer: {folder} has no vocabulary; expected tokenizer.json")
        if self._tokenizer.eos_token_id is None:
            raise GramianError(
                f"data.tokenizer: {folder} has no end-of-text token; expected eos_token in tokenizer_config.json"
            )
        self.end = int(self._tokenizer.eos_token_id)
        self.vocabulary = 1 + max(self.end, *self._tokenizer.get_vocab().values())
        self.folder, self.digest = folder, _digest_of(folder)

    def encode(self, text: str | bytes) -> Ids:
        """Return the token ids of a text, [n], without special tokens around it."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=token_type(self.vocabulary))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of token ids, without the end id."""
        without_end = [int(token) for token in ids if token != self.end]
        return str(self._tokenizer.decode(without_end, clean_up_tokenization_spaces=False))

    def text_bytes(self, ids: Ids) -> int:
        """Return the number of bytes of the decoded text; half a character at an end counts as three."""
        return len(self.decode(ids).encode(errors="replace"))


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a folder that determine the ids of its tokenizer, sorted."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and (path.name in _FILES or path.suffix in _SUFFIXES)
    )


def _digest_of(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in tokenizer_files(folder):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
