"""`gramian init [DIR]`: write a commented run.toml for your text, your model folder or the embedded corpus.

Without --text and --model, DIR is searched for text files and for the folder of a Hugging Face model.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from gramian.cli.terminal import make_console, show
from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError

LOOKED_FOR = (".txt", ".md", ".jsonl", ".ndjson", ".parquet", ".arrow")
"""Suffixes of the files that are looked for in DIR."""
FEWEST_TOKENS = 256
"""Least number of tokens that a config is written for."""
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
"""Keys of a Hugging Face config.json that state how many tokens a model reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian init` to a parser."""
    add = parser.add_argument
    add("folder", nargs="?", default=".", metavar="DIR", help="where run.toml goes (default: here)")
    add("--text", nargs="+", metavar="PATH", help="text or JSONL files, or folders of them, to train on")
    add("--model", metavar="FOLDER", help="folder of a Hugging Face causal language model to fine-tune")
    add("--example", metavar="NAME", help="write this example as it is; an unknown name lists them")


def run(arguments: argparse.Namespace) -> int:
    """Write run.toml and print what it trains, on what, and the next commands. Returns the exit code."""
    from gramian.train.config.example_configs import example_text, fill

    path = Path(arguments.folder) / "run.toml"
    if path.exists():
        raise GramianError(f"{path}: is already there; expected another DIR, or none of that name")
    if arguments.example is not None:
        if arguments.text or arguments.model:
            raise GramianError("argument --example: is written as it is; expected it without --text and --model")
        try:
            text, what = example_text(arguments.example), f"the example {arguments.example}"
        except GramianError as problem:
            raise GramianError(f"argument --{problem}") from None
    else:
        values, what = _values(Path(arguments.folder), arguments.text, arguments.model)
        text = fill(_without_header(example_text("huggingface" if "model.path" in values else "gpt_small")), values)
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise GramianError("argument --text: a name or a key is not UTF-8; expected one that is") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as problem:
        raise GramianError(f"{path}: {problem.strerror}; expected a folder that can be written to") from None
    show(
        make_console(),
        f"{path}: {what}",
        f"  gramian doctor {path}    checks data, model and memory before anything is trained",
        f"  gramian train {path}     trains; the same command continues an interrupted run",
    )
    return 0


def _values(folder: Path, text: list[str] | None, model: str | None) -> tuple[dict[str, Any], str]:
    """{"section.key": value} of the new config, and one line that says what it trains, on what."""
    from gramian.data.first_look import look_at_files

    found = _texts(folder) if text is None else [Path(name) for name in text]
    look = look_at_files(found, "argument --text") if found else None
    home = _model_folder(folder) if model is None else Path(model)
    values: dict[str, Any] = {
        "run.folder": f"runs/{(Path(os.path.abspath(folder)).name or 'run') if folder != Path('.') else 'run'}"
    }
    length, trained = 128, "trains a small GPT"
    if home is not None:
        length, trained = min(512, _context(home)), f"fine-tunes {home}"
        values |= {"model.path": str(home), "data.length": length}
    if look is None:
        if home is not None:
            raise GramianError(
                f"argument --text: none given, and no text file in {folder}; expected what to train --model {home} on"
            )
        return values, f"{trained} on the embedded corpus"
    tokens = look.size // (4 if home is not None else 1)
    if tokens < FEWEST_TOKENS:
        raise GramianError(
            f"argument --text: {look.size:,} bytes are about {tokens:,} tokens; expected at least {FEWEST_TOKENS:,}"
        )
    length = min(length, tokens // 16)
    values |= {"data.source": look.source, "data.files": [str(file) for file in found], "data.length": length}
    values["data.batch"] = max(1, min(16, tokens // length // 8))
    if look.field != "text":
        values["data.field"] = look.field
    if look.record != "text":
        values["data.record"] = look.record
    if look.record == "chat" and home is None:
        raise GramianError(
            "argument --text: holds chats, which a tokenizer's chat template writes; expected --model FOLDER with one"
        )
    named = f"{', '.join(map(str, found[:3]))}{' …' * (len(found) > 3)}"
    files = "1 file" if look.files == 1 else f"{look.files:,} files"
    kinds = {"text": f'texts under "{look.field}"', "completion": "prompts and completions", "chat": "chats"}
    under = "" if look.source in ("text", "tokens") else f", {kinds[look.record]}"
    return values, f"{trained} on {named} ({files}, {format_bytes(look.size)}{under})"


def _texts(folder: Path) -> list[Path]:
    """Text and JSONL files in a folder, sorted, without hidden files and READMEs; none of a folder that holds a project."""
    if any((folder / name).exists() for name in (".git", "pyproject.toml")):
        return []
    return sorted(
        file for file in folder.glob("*") if file.suffix in LOOKED_FOR and not file.name.startswith((".", "README"))
    )


def _model_folder(folder: Path) -> Path | None:
    """The folder, or the one folder in it, that has config.json and weights of a Hugging Face model; None: there is none."""
    found = [
        path
        for path in (folder, *sorted(path for path in folder.glob("*") if path.is_dir()))
        if (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    ]
    if len(found) > 1:
        raise GramianError(f"argument --model: {', '.join(map(str, found))} are models; expected one of them")
    return found[0] if found else None


def _context(model: Path) -> int:
    """Number of tokens that a Hugging Face model reads, from its config.json; a GramianError if it cannot be read."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise GramianError(
            f"argument --model: {model} has no readable config.json; expected a folder that save_pretrained wrote"
        ) from None
    found = config.get if isinstance(config, dict) else {}.get
    return next((n for key in CONTEXT if isinstance(n := found(key), int) and n > 0), 512)


def _without_header(text: str) -> str:
    """An example without the comment lines at its top, which name its own file."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("["))
    header = ["# Written by `gramian init`. Keys marked * may change between two starts of a run.", ""]
    return "\n".join([*header, *lines[first:]])
