"""Tokenizers: what is encoded is decoded, no text ends a document, and what is no tokenizer is one line."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.core.errors import GramianError
from gramian.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, token_type

END = "<|endoftext|>"


def saved(folder: Path, end: str | None = END) -> Path:
    """A byte-level BPE of a few merges, as `save_pretrained` writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["hello world, hello you"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=50)
@given(st.text("aé€😀\n\0", max_size=30))
def test_bytes_are_decoded_to_what_was_encoded(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert tokenizer.decode([*ids, tokenizer.end]) == text


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert ByteTokenizer().decode(np.array([65, 255, 66])) == "A\ufffdB"


def test_huggingface_is_decoded_to_what_was_encoded(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for text in ("hello world", " ünïcode , and  spaces\n", ""):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert (ids < tokenizer.vocabulary).all()
        assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
        assert tokenizer.decode(np.append(ids, tokenizer.end)) == text
    assert len(tokenizer.encode("hello")) < 5


def test_a_document_that_spells_the_end_does_not_end(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode(f"hello{END}you")
    assert tokenizer.end not in ids
    assert tokenizer.decode(ids) == f"hello{END}you"


def test_digest_is_of_the_files_that_decide_ids(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "model.safetensors").write_bytes(b"weights")
    first = HuggingFaceTokenizer(folder).digest
    assert HuggingFaceTokenizer(other).digest == first
    path = other / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert HuggingFaceTokenizer(other).digest != first
    assert ByteTokenizer().digest != first


def test_what_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "endless", end=None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    for name, reason in (
        ("missing", "is not a folder"),
        ("empty", "has no readable tokenizer"),
        ("broken", "has no readable tokenizer"),
        ("model", "has no vocabulary"),
        ("endless", "has no end-of-text token"),
    ):
        with pytest.raises(GramianError, match=f"^data.tokenizer: .*{name} {reason}.*; expected") as caught:
            load_tokenizer(str(tmp_path / name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("vocabulary", "expected"), [(257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(vocabulary: int, expected: str) -> None:
    assert token_type(vocabulary) == np.dtype(expected)
