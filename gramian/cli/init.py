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
from gramian.core.errors import GramianError

TEXT = {"text": (".txt", ".md"), "jsonl": (".jsonl", ".ndjson")}
"""{value of `data.source`: suffixes of the files that are looked for in DIR}."""
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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
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
    found = _texts(folder) if text is None else [Path(name) for name in text]
    for file in found:
        if not file.exists():
            raise GramianError(
                f"argument --text: {file} does not exist; expected text or JSONL files, or folders of them"
            )
    home = _model_folder(folder) if model is None else Path(model)
    values: dict[str, Any] = {
        "run.folder": f"runs/{(Path(os.path.abspath(folder)).name or 'run') if folder != Path('.') else 'run'}"
    }
    if home is not None:
        length = min(512, _context(home))
        values |= {"model.path": str(home), "data.length": length}
    if found:
        values |= {"data.source": _source(found), "data.files": [str(file) for file in found]}
    elif home is not None:
        raise GramianError(
            f"argument --text: none given, and no text file in {folder}; expected what to train {home} on"
        )
    size = sum(
        file.stat().st_size
        for path in found
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file()
    )
    if found:
        windows = size // (values.get("data.length", 128) * (4 if home else 1))
        values["data.batch"] = max(1, min(16, windows // 8))
    trained = f"fine-tunes {home}" if home is not None else "trains a small GPT"
    on = (
        f"{', '.join(map(str, found[:3]))}{' …' * (len(found) > 3)} ({size / 1e6:,.1f} MB)"
        if found
        else "the embedded corpus"
    )
    return values, f"{trained} on {on}"


def _texts(folder: Path) -> list[Path]:
    """Text files in a folder, or JSONL files if there is no text; sorted, without hidden files and READMEs."""
    for suffixes in TEXT.values():
        files = sorted(
            file for file in folder.glob("*") if file.suffix in suffixes and not file.name.startswith((".", "README"))
        )
        if files:
            return files
    return []


def _source(files: list[Path]) -> str:
    """`data.source` of some files or folders: "jsonl" if their suffixes are those of JSON lines, else "text"."""
    names = [file for path in files for file in ([path] if path.is_file() else path.rglob("*"))]
    return "jsonl" if any(file.suffix in TEXT["jsonl"] for file in names) else "text"


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
    return next((int(config[key]) for key in CONTEXT if isinstance(config.get(key), int)), 512)


def _without_header(text: str) -> str:
    """An example without the comment lines at its top, which name its own file."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("["))
    header = ["# Written by `gramian init`. Keys marked * may change between two starts of a run.", ""]
    return "\n".join([*header, *lines[first:]])
