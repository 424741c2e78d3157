"""Write the model of a saved run into a folder that other programs read.

A Hugging Face model becomes the folder that `save_pretrained` writes, with its tokenizer; GPT and Goose become one safetensors
file beside the numbers of their shape. Either has a card that says where the weights come from.
"""

import copy
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from gramian.core.durable_files import sync_path
from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.data.tokenizer import tokenizer_files
from gramian.models.goose import Goose
from gramian.models.gpt import GPT
from gramian.train.state.saved_run import SavedRun, load_run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_model(run: Path, folder: Path, dtype: str = "fp32") -> SavedRun:
    """Write the best model of the run in folder `run` into the new folder `folder`; returns what was written.

    Everything is written under a temporary name, read back, compared bit for bit with the model, and renamed: `folder` is
    complete or not there.

    Args:
        run: folder of a run.
        folder: folder to write, which must not exist or be empty.
        dtype: number format of floating-point weights, "fp32", "bf16" or "fp16"; runs store float32.

    Raises:
        GramianError: if there is no such run, or the folder has something in it or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GramianError(f"argument FOLDER: {folder} is not empty; expected a folder that does not exist yet")
    saved = load_run(run, "argument RUN_DIR")
    model = saved.model.to(DTYPES[dtype])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as problem:
        raise GramianError(f"argument FOLDER: {folder}: {problem.strerror}; expected one that can be written") from None
    try:
        os.chmod(written, 0o755)
        if isinstance(model, GPT | Goose):
            _write_own(model, written)
        else:
            _write_huggingface(model, saved, written)
        (written / "README.md").write_text(_card(run, saved, dtype), encoding="utf-8")
        for file in (*written.iterdir(), written):
            sync_path(file)
        if folder.exists():
            folder.rmdir()
        written.rename(folder)
    except OSError as problem:
        raise GramianError(f"argument FOLDER: {folder}: {problem.strerror}; expected room for the model") from None
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return saved


def _write_own(model: GPT | Goose, folder: Path) -> None:
    """Write model.safetensors and config.json of a GPT or Goose, and read them back."""
    shape = {"kind": type(model).__name__, **dataclasses.asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")
    save_model(model, str(folder / "model.safetensors"))
    again = copy.deepcopy(model).apply(_forget)
    load_model(again, str(folder / "model.safetensors"))
    _refuse_different(model, again, folder)


def _forget(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.constant_(p, torch.nan)


def _write_huggingface(model: Any, saved: SavedRun, folder: Path) -> None:
    """Write a Hugging Face model with `save_pretrained`, and the files of its tokenizer; read the model back."""
    from gramian.models.huggingface import open_model_folder

    with open_model_folder(str(saved.config.model.path)):
        model.save_pretrained(folder, safe_serialization=True)
    tokenizer = saved.config.data.tokenizer
    for file in tokenizer_files(Path(tokenizer)) if Path(tokenizer).is_dir() else []:
        shutil.copyfile(file, folder / file.name)
    with open_model_folder(str(folder)) as (_, causal):
        again = causal.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=model.dtype)
    _refuse_different(model, again, folder)


def _refuse_different(model: nn.Module, again: nn.Module, folder: Path) -> None:
    """Raise a GramianError if a tensor of the model that was read back differs from the one that was written."""
    mine, theirs = model.state_dict(), again.state_dict()
    for name, tensor in mine.items():
        if name not in theirs or not torch.equal(tensor.cpu(), theirs[name].cpu()):
            raise GramianError(
                f"{folder}: {name} was not read back as it was written; expected a disk and a library that do"
            )


def _card(run: Path, saved: SavedRun, dtype: str) -> str:
    """Text of the model card: where the weights come from, how to load them, and what is known about ε."""
    config, own = saved.config, isinstance(saved.model, GPT | Goose)
    kind = type(saved.model).__name__
    lines = [
        "---",
        "library_name: gramian" if own else "library_name: transformers",
        "---",
        f"# {run.resolve().name}",
        "",
        f"{kind} of {sum(p.numel() for p in saved.model.parameters()):,} parameters in {dtype}: step {saved.step:,} of "
        f"{config.run.steps:,}{', the best by validation loss' if saved.best else ''}, written by gramian {VERSION}.",
        "",
        f"- data: {config.data.source}, windows of {config.data.length:,} tokens; tokenizer: "
        f"{'bytes (id 256 ends a document)' if config.data.tokenizer in ('auto', 'bytes') else 'the one in this folder'}",
        f"- optimizer: {config.optimizer.kind}, learning rate {config.optimizer.lr:g}, {config.data.batch:,} windows a step",
    ]
    if config.model.path is not None:
        lines.append(f"- {'shape of' if config.model.fresh else 'started from'} {Path(config.model.path).name}")
    if config.teacher is not None:
        lines.append(f"- distilled from {Path(config.teacher.path).name}")
    if config.privacy is not None:
        lines.append(f"- private training: {_privacy(run)}")
    if own:
        load = [f"model = {kind}({kind}Config(**shape))", 'load_model(model, "model.safetensors")']
        imports = [f"from gramian.models import {kind}, {kind}Config", "from safetensors.torch import load_model"]
        code = ["import json", *imports, "", 'shape = json.load(open("config.json"))', 'del shape["kind"]', *load]
    else:
        code = [
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained(".")',
        ]
    return "\n".join([*lines, "", "```python", *code, "```", ""])


def _privacy(run: Path) -> str:
    """What record.json of a private run says about ε."""
    privacy = json.loads((run / "record.json").read_text(encoding="utf-8")).get("privacy", {})
    reasons = privacy.get("epsilon_not_valid_because") or []
    return (
        f"ε is not valid ({reasons[0]})"
        if reasons
        else f"ε is {privacy.get('epsilon', 'not known')}; see the run's record.json"
    )
