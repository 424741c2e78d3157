"""A corpus of documentation as tokens of a byte-pair vocabulary, for the language problem of `optimizer_race`.

Reads every text file below the folders that are named (plain, gzipped, or HTML without its tags), each distinct text once, and
trains a byte-level BPE vocabulary on the training part. One document in fifty, the first in the order of their hashes, is held
out. Folders are unpacked Debian packages of documentation; none is in the repository, the file names each and its bytes.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

PACKED = (".gz", ".dz")
LEAST = 500
"""Characters of the shortest document that is kept."""


def documents(folder: Path) -> Iterator[str]:
    """Texts of the files below a folder; tags, scripts and entities of HTML are removed.

    A page is left out where a text of the same name lies in the same package, of which it is most likely made.
    """
    files = [file for file in sorted(folder.rglob("*")) if _is_text(file)]
    texts = {_stem(file) for file in files if not _is_page(file)}
    for file in files:
        if _is_page(file) and _stem(file) in texts:
            continue
        raw = gzip.decompress(file.read_bytes()) if file.suffix in PACKED else file.read_bytes()
        text = raw.decode(errors="ignore")
        if len(text.encode()) < 0.999 * len(raw):
            continue  # not UTF-8
        if _is_page(file) or "<html" in text[:2000].lower():
            text = re.sub(r"(?is)<(script|style|nav|head)\b.*?</\1>", " ", text)
            text = html.unescape(re.sub(r"<[^>]+>", "", text))
            text = re.sub(r"[ \t]+\n", "\n", re.sub(r"\n\s*\n\s*\n+", "\n\n", text))
        if len(text) >= LEAST:
            yield text


def _is_text(file: Path) -> bool:
    named = not {".txt", ".rst", ".pod", ".dict", ".html", ".xhp"}.isdisjoint(file.suffixes)
    hidden = {"_sources", "translations"} & set(file.parts)
    return file.is_file() and not file.is_symlink() and named and not hidden


def _is_page(file: Path) -> bool:
    return not {".html", ".xhp"}.isdisjoint(file.suffixes)


def _stem(file: Path) -> str:
    return file.name.split(".")[0]


def main() -> None:
    """Write tokens and vocabulary to one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=24_000_000, help="training tokens that are kept")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file")
    options = parser.parse_args()
    seen: set[bytes] = set()
    pieces: list[tuple[bytes, str]] = []
    sources: dict[str, int] = {}
    for folder in options.folders:
        for text in documents(folder):
            for piece in (text[at : at + 100_000] for at in range(0, len(text), 100_000)):
                digest = hashlib.sha256(re.sub(r"\s+", " ", piece).encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                pieces.append((digest, piece))
                sources[folder.name] = sources.get(folder.name, 0) + len(piece.encode())
    pieces.sort()  # by hash: an order that has nothing to do with the sources
    cut = len(pieces) // 50
    parts = {"held_out": [text for _, text in pieces[:cut]], "training": [text for _, text in pieces[cut:]]}
    tokenizer = ByteLevelBPETokenizer()
    end = "<|end|>"
    sample = parts["training"][:: max(1, sum(map(len, parts["training"])) // 25_000_000)]
    tokenizer.train_from_iterator(sample, options.vocabulary, min_frequency=2, special_tokens=[end])
    found = {}
    for name, texts in parts.items():
        ids = [
            np.asarray([*line.ids, 0], dtype=np.uint16)
            for start in range(0, len(texts), 500)
            for line in tokenizer.encode_batch(texts[start : start + 500])
        ]
        found[name] = np.concatenate(ids)[: options.tokens]
    facts = {"sources": sources, "vocabulary": tokenizer.get_vocab_size(), **{k: len(v) for k, v in found.items()}}
    raw = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    np.savez_compressed(options.out, facts=raw, training=found["training"], held_out=found["held_out"])
    print(json.dumps(facts, indent=1), options.out.stat().st_size)


if __name__ == "__main__":
    main()
