"""`gramian eval RUN_DIR | CONFIG.toml [--prompt TEXT]`: perplexity on the validation data by two protocols, or a text."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.train import check_device
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.train.config.config import Config


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of a run's model, or a text by it",
        description="Perplexity of a run's best checkpoint on its validation data, non-overlapping and sliding; or, with "
        "--prompt, a text. Also under torchrun.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="RUN_DIR | CONFIG.toml", help="a run folder, or a config whose run there is")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with a config")
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text instead")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens of the text (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="of the text (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the text (default: 0)")
    parser.add_argument("--stride", type=int, metavar="N", help="of the sliding protocol (default: half a window)")
    parser.add_argument("--windows", type=int, metavar="N", help="of each protocol, from the first on (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, or write a text."""
    for name in ("tokens", "windows", "stride"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise GramianError(f"argument --{name}: {value}; expected at least 1")
    if arguments.prompt is not None and arguments.prompt.encode(errors="replace").decode() != arguments.prompt:
        raise GramianError("argument --prompt: is no UTF-8; expected text")
    for name in ("windows", "stride", "json"):
        if arguments.prompt is not None and getattr(arguments, name) is not None:
            raise GramianError(f"argument --{name}: is of the perplexity; expected it without --prompt")
    if not 0 < arguments.temperature < math.inf:
        raise GramianError(f"argument --temperature: {arguments.temperature}; expected a number above 0")
    if not 0 <= arguments.seed < 2**63:
        raise GramianError(f"argument --seed: {arguments.seed}; expected from 0 to 2^63 - 1")
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        raise GramianError(
            f"argument --json: {arguments.json} cannot be written; expected a file in an existing folder"
        )
    folder, device = _run_folder(arguments.target, arguments.overrides)

    from gramian.parallel.world import world

    with world(device == "cpu", False) as where:
        return _evaluate(arguments, folder, where)


def _run_folder(target: str, overrides: list[str]) -> tuple[Path, str]:
    from gramian.train.config.config import load_config

    path = Path(target)
    if path.is_dir():
        if overrides:
            raise GramianError(f"{overrides[0]!r}: a run has its own config; expected no override with RUN_DIR")
        return path, "auto"
    config: Config = load_config(path, overrides)
    check_device(config)
    return Path(config.run.folder), config.run.device


def _evaluate(arguments: argparse.Namespace, folder: Path, where: Any) -> int:
    from gramian.cli.terminal import bar, console
    from gramian.data import load_windows
    from gramian.train.loop.objective import logits_of
    from gramian.train.loop.perplexity import perplexity
    from gramian.train.loop.precision import numbers_for, set_globals
    from gramian.train.loop.stepper import evaluating
    from gramian.train.state.saved_run import load_run

    out = console(quiet=os.environ.get("RANK", "0") != "0")
    saved = load_run(folder, "run folder")
    config = saved.config
    set_globals(config.precision, config.run.deterministic)
    numbers = numbers_for(config.precision, where.device)
    model = saved.model.to(device=where.device, dtype=numbers.weights)
    if arguments.stride is not None and arguments.stride >= config.data.length:
        raise GramianError(
            f"argument --stride: {arguments.stride}; expected less than the window, which is {config.data.length}"
        )
    out.print(f"{saved.folder}: step {saved.step}{', the best' if saved.best else ''}", markup=False, soft_wrap=True)
    if arguments.prompt is not None:
        out.print(_text(arguments, config, model), markup=False, soft_wrap=True)
        return 0
    _, validation = load_windows(config.data)
    data, stride = config.data, arguments.stride or max(1, config.data.length // 2)
    found = []
    with evaluating(model), numbers.autocast():
        for each in (None, stride) if data.length > 1 else (None,):
            with bar(out, "non-overlapping" if each is None else "sliding") as progress:
                found.append(
                    perplexity(
                        lambda tokens_BT: logits_of(model, tokens_BT),
                        validation.stream,
                        where,
                        length=data.length,
                        stride=each,
                        pack=data.pack and not data.isolate,
                        rows=data.micro_batch or 16,
                        limit=arguments.windows,
                        progress=progress,
                    )
                )
            out.print(str(found[-1]), markup=False, soft_wrap=True)
    if config.privacy is not None:
        out.print("Perplexity is computed on the validation data, which ε does not cover.", markup=False)
    if arguments.json is not None and where.rank == 0:
        rows = [{**vars(each), "loss": each.loss, "perplexity": each.perplexity} for each in found]
        told = {"run": str(folder), "step": saved.step, "best": saved.best, "results": rows}
        Path(arguments.json).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


def _text(arguments: argparse.Namespace, config: Config, model: Any) -> str:
    import torch

    from gramian.data import load_tokenizer
    from gramian.models.text_generation import generate_text_tokens

    tokenizer = load_tokenizer(config.data.tokenizer)
    prompt = torch.from_numpy(tokenizer.encode(arguments.prompt).astype("int64")).to(next(model.parameters()).device)
    if not len(prompt):
        raise GramianError("argument --prompt: is empty; expected some text to go on from")
    tokens_T = generate_text_tokens(model, prompt, arguments.tokens, arguments.temperature, arguments.seed)
    # A padded head has ids that the tokenizer lacks; a model that has learnt anything never draws them.
    return tokenizer.decode([token for token in tokens_T.tolist() if token < tokenizer.vocabulary])
