"""`gramian eval RUN_DIR | CONFIG.toml [--prompt TEXT]`: perplexity of a run's best checkpoint, or a text by it.

The perplexity is that of the validation data, with non-overlapping and with sliding windows. Also under torchrun.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import is_first_process
from gramian.cli.config_arguments import check_device, positive_integer, seed_number
from gramian.cli.terminal import duration, make_console, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.train.config.config import Config

RATES = {"cpu": 2e10, "cuda": 5e13}
"""{device: FLOP/s that an evaluation is assumed to reach}, low rather than high."""
ENOUGH = 60.0
"""Seconds that an evaluation takes where a complete one would take more than twice as long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian eval` to a parser."""
    add = parser.add_argument
    add("target", metavar="RUN_DIR | CONFIG.toml", help="a run folder, or a config whose run there is")
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--prompt", metavar="TEXT", help="continue this text instead")
    add(
        "--tokens",
        type=positive_integer,
        metavar="N",
        help="tokens of the text (default: 200, or what the model reads)",
    )
    add("--temperature", type=float, default=0.8, metavar="T", help="of the text (default: 0.8)")
    add("--seed", type=seed_number, default=0, metavar="SEED", help="of the text (default: 0)")
    add("--stride", type=positive_integer, metavar="N", help="of the sliding protocol (default: half a window)")
    add("--windows", type=positive_integer, metavar="N", help="of each protocol, from the first on (default: all, or "
        "as many as take about a minute where all take more than two)")  # fmt: skip
    add("--json", metavar="FILE", help="write the numbers too")


def run(arguments: argparse.Namespace) -> int:
    """Print the perplexity of a run's model, or with --prompt a text that it generates. Returns the exit code."""
    for name in ("windows", "stride", "json"):
        if arguments.prompt is not None and getattr(arguments, name) is not None:
            raise GramianError(f"argument --{name}: is an option of the perplexity; expected it without --prompt")
    if not 0 < arguments.temperature < math.inf:
        raise GramianError(f"argument --temperature: {arguments.temperature}; expected a number above 0")
    file = None if arguments.json is None else Path(arguments.json).absolute()
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise GramianError(
            f"argument --json: {arguments.json} cannot be written; expected a file in an existing folder"
        )
    folder, device = _run_folder(arguments.target, arguments.overrides)

    from gramian.parallel.world import world

    field = "run folder" if Path(arguments.target).is_dir() else "run.folder"
    with world(device == "cpu", False) as grid:
        return _evaluate(arguments, folder, grid, field)


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


def _evaluate(arguments: argparse.Namespace, folder: Path, grid: Any, field: str) -> int:
    from gramian.data import load_windows
    from gramian.models.token_sampling import evaluation_mode
    from gramian.train.loop.objective import logits_of
    from gramian.train.loop.perplexity import perplexity
    from gramian.train.loop.precision import resolve_precision, set_globals
    from gramian.train.state.saved_run import load_run

    console = make_console(quiet=not is_first_process())
    saved = load_run(folder, field)
    config = saved.config
    set_globals(config.precision, config.run.deterministic)
    numbers = resolve_precision(config.precision, grid.device)
    model = saved.model.to(device=grid.device, dtype=numbers.weights)
    if arguments.stride is not None and arguments.stride >= config.data.length:
        raise GramianError(
            f"argument --stride: {arguments.stride}; expected less than the window, which is {config.data.length}"
        )
    show(console, f"{saved.folder}: step {saved.step}{', the best' if saved.best else ''}")
    if arguments.prompt is not None:
        show(console, _text(arguments, config, model))
        return 0
    _, validation = load_windows(config.data)
    if saved.data.get("validation", validation.digest) != validation.digest:
        field = "data.validation_files" if config.data.validation_files else "data.files"
        raise GramianError(
            f"{field}: the validation data is not what {folder} was validated on; expected the files as they were"
        )
    data, stride = config.data, arguments.stride or max(1, config.data.length // 2)
    windows = arguments.windows or _affordable(console, model, validation, stride, grid.device.type)
    found = []
    with evaluation_mode(model), numbers.autocast():
        for each in (None, stride) if data.length > 1 else (None,):
            with progress_bar(console, "non-overlapping" if each is None else "sliding") as update:
                found.append(
                    perplexity(
                        lambda tokens_BT: logits_of(model, tokens_BT),
                        validation.stream,
                        grid,
                        length=data.length,
                        stride=each,
                        pack=data.pack and not data.isolate,
                        rows=data.micro_batch or 16,
                        limit=windows,
                        progress=update,
                    )
                )
            show(console, str(found[-1]))
    if config.privacy is not None:
        show(console, "Perplexity is computed on the validation data, which ε does not cover.")
    if arguments.json is not None and grid.rank == 0:
        rows = [{**vars(each), "loss": each.loss, "perplexity": each.perplexity} for each in found]
        report = {"run": str(folder), "step": saved.step, "best": saved.best, "results": rows}
        try:
            Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as problem:
            raise GramianError(
                f"argument --json: {arguments.json}: {problem.strerror}; expected a file in an existing folder"
            ) from None
    return 0


def _affordable(console: Any, model: Any, validation: Any, stride: int, device: str) -> int | None:
    """Number of windows of each protocol to score if none is given: None (all), or as many as take a minute; prints why.

    It follows from sizes, 2 FLOPs for each parameter and token at the rate `RATES`, and from no clock: every run has the same.
    """
    count, length = len(validation), validation.length
    each = 2 * sum(p.numel() for p in model.parameters()) * length / RATES[device]
    seconds = each * count * (1 + length / stride)
    show(console, f"scoring {count:,} windows of {length:,} tokens takes about {duration(seconds)}")
    if seconds <= 2 * ENOUGH:
        return None
    windows = max(1, min(count, int(ENOUGH / each / 2)))
    show(console, f"the first {windows:,} of each protocol are scored; --windows {count:,} scores all".replace(",", ""))
    return windows


def _text(arguments: argparse.Namespace, config: Config, model: Any) -> str:
    import torch

    from gramian.data import load_tokenizer
    from gramian.models.text_generation import generate_text_tokens

    tokenizer = load_tokenizer(config.data.tokenizer)
    prompt = torch.from_numpy(tokenizer.encode(arguments.prompt).astype("int64")).to(next(model.parameters()).device)
    if not len(prompt):
        raise GramianError("argument --prompt: is empty; expected some text to continue")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of a Hugging Face model
    room = 200 if limit is None else limit - len(prompt)
    if room < 1 or (limit is not None and (arguments.tokens or 0) > room):
        raise GramianError(
            f"argument {'--prompt' if room < 1 else '--tokens'}: the model reads {limit:,} tokens, the prompt has "
            f"{len(prompt):,}; expected at most {limit:,} with the text"
        )
    tokens = arguments.tokens or min(200, room)
    tokens_T = generate_text_tokens(model, prompt, tokens, arguments.temperature, arguments.seed)
    # A padded head has ids that the tokenizer lacks; a model that has learnt anything never draws them.
    text = tokenizer.decode([token for token in tokens_T.tolist() if token < tokenizer.vocabulary])
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)  # no escape sequence for a terminal
