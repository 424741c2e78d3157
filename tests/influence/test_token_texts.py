"""The texts of tokens against growing prefixes of the passage, for tokenizers whose characters have several tokens."""

import json
import random
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gramian.data.tokenizer import ByteTokenizer
from gramian.influence import Query
from gramian.influence.findings import find
from gramian.influence.influence_page import page_html
from gramian.influence.token_texts import token_texts
from tests.influence.corpora import PASSAGES, built, corpus

TEXTS = (
    "Τα ελληνικά κείμενα είναι εδώ.",
    "日本語の文章です。これも。",
    "It isn't , is it ?  Two  spaces.",
    "é 😀 👩\u200d👧 \ufffd ok \ufffd",
    "",
)


def bytes_of() -> Any:
    """Every byte is a token."""
    return ByteTokenizer()


def byte_level() -> Any:
    """BPE of bytes, whose merges cross the ends of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False))
    return made


def byte_fallback() -> Any:
    """Pieces with a mark for the space before a word, the first of which is dropped; bytes where there is no piece."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    made.train_from_iterator([TEXTS[2]], trainer)
    return made


def words() -> Any:
    """Words, with the spaces before punctuation cleaned away."""
    made = Tokenizer(
        models.WordPiece({"[UNK]": 0, "It": 1, "is": 2, ",": 3, "?": 4, "##n": 5, "it": 6}, unk_token="[UNK]")
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=True)
    return made


def by_prefixes(decode: Any, ids: list[int]) -> list[str]:
    """The text that a token adds to what its prefix has of the passage's text."""
    ends = [len(commonprefix([decode(ids), decode(ids[: end + 1])])) for end in range(len(ids))]
    ends = [max(ends[: place + 1]) for place in range(len(ids))]
    return [decode(ids)[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("make", [bytes_of, byte_level, byte_fallback, words])
def test_texts_of_tokens_are_the_text_of_the_passage(make: Any) -> None:
    made = make()
    own = isinstance(made, ByteTokenizer)

    def decode(ids: Any) -> str:
        return made.decode(list(ids)) if own else made.decode(list(ids), skip_special_tokens=False)

    for text in (*TEXTS, " ".join(TEXTS)):
        ids = list(map(int, made.encode(text))) if own else made.encode(text).ids
        for cut in range(4):  # passages begin and end inside of characters
            for part in (ids[cut:], ids[: len(ids) - cut]):
                found = token_texts(decode, part)
                assert "".join(found) == decode(part) and len(found) == len(part)
                assert found == by_prefixes(decode, part)


def test_a_character_is_shown_at_the_token_that_completes_it() -> None:
    decode = ByteTokenizer().decode
    assert token_texts(decode, list("aπ日!".encode())) == ["a", "", "π", "", "", "日", "!"]
    assert token_texts(decode, [256, *"π".encode(), 256]) == ["", "", "π", ""]
    assert token_texts(decode, []) == []


def test_bytes_that_are_no_text_are_all_there() -> None:
    decode = ByteTokenizer().decode
    for _ in range(200):
        ids = [random.randrange(256) for _ in range(random.randrange(12))]
        assert "".join(token_texts(decode, ids)) == decode(ids)


def test_a_query_shows_characters_with_one_score_for_each_token(tmp_path: Path) -> None:
    letters = "日本語π".encode()  # an id of the corpus is one of its bytes
    found = replace(corpus(), decode=lambda ids: bytes(letters[int(one)] for one in ids).decode(errors="replace"))
    asked = built(tmp_path / "index", found).ask([Query("", "", (3, 4, 5, 6))])
    shown, _ = find(asked, found, PASSAGES)
    parts = asked.parts(list(range(PASSAGES)))
    cards = [one for side in ("likelier", "less_likely") for one in shown["queries"][0][side]]
    assert len(cards) == PASSAGES
    for one in cards:
        tokens = found.tokens_NT[one["passage"]]
        assert "".join(one["tokens"]) == found.decode(tokens.tolist())
        assert len(one["tokens"]) == len(one["token_scores"]) == len(tokens)
        assert one["token_scores"] == pytest.approx(parts.tokens_QPT[0, one["passage"], :-1].tolist())
    assert json.loads(json.dumps(shown)) == shown and "�" in page_html("Influence", shown)
