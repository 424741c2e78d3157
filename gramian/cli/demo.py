"""`gramian demo`: train the reference GPT for about a minute and show what its gradients say."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gramian.cli import RunFailed
from gramian.errors import GramianError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.train.demo_observation import GradientNoise, ObservationReport
    from gramian.train.demo_run import DemoResult, Progress

# Lines of progress, and columns, where the output is not a terminal.
PLAIN_LINES = 10
PLAIN_WIDTH = 100


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on the standard library's source and report on its gradients",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder for demo.json")
    parser.add_argument("--seconds", type=_seconds, default=60.0, help="time budget of the run (default: 60)")
    parser.add_argument("--seed", type=_seed, default=0, help="of weights, data order and sample (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, print the report and write `demo.json`."""
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise GramianError(
            f"argument --out: {out}: {problem.strerror}; accepted: a folder that can be written"
        ) from None

    from rich.console import Console

    from gramian.train.corpus import load_corpus
    from gramian.train.demo_run import DemoConfig, run_demo

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    try:
        corpus = load_corpus()
        with _progress(console, arguments.seconds) as on_progress:
            config = DemoConfig(seconds=arguments.seconds, seed=arguments.seed)
            result = run_demo(config, corpus, on_progress)
    except FloatingPointError as problem:
        raise RunFailed(f"demo: {problem}") from None

    for part in _report(result):
        console.print(part)
    target = out / "demo.json"
    try:
        target.write_text(json.dumps(_numbers(result), indent=2) + "\n")
    except OSError as problem:
        raise RunFailed(f"demo: {target}: {problem.strerror}") from None
    console.print(f"numbers: {target}", markup=False, soft_wrap=True)
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: a number of seconds above 0")
    return seconds


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted: an integer from 0 to 2**63 - 1")
    return seed


@contextmanager
def _progress(console: Console, seconds: float) -> Iterator[Callable[[Progress], None]]:
    """Show progress as a live bar on a terminal, and as a few plain lines elsewhere."""
    if not console.is_terminal:
        yield _plain_lines(console)
        return

    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), console=console) as bar:
        task = bar.add_task(f"training for about {seconds:g} s", total=1.0)
        yield lambda progress: bar.update(task, completed=progress.fraction, description=_status(progress))


def _plain_lines(console: Console) -> Callable[[Progress], None]:
    printed = 0

    def on_progress(progress: Progress) -> None:
        nonlocal printed
        reached = int(progress.fraction * PLAIN_LINES)
        if reached > printed:
            printed = reached
            console.print(_status(progress), markup=False)

    return on_progress


def _status(progress: Progress) -> str:
    return (
        f"step {progress.step:4d}  loss {progress.loss:.3f}  validation {progress.validation_loss:.3f}"
        f"  {progress.tokens_per_second:,.0f} tokens/s  {progress.elapsed:.0f} s"
    )


def _report(result: DemoResult) -> Iterator[RenderableType]:
    from rich.panel import Panel
    from rich.text import Text

    yield Panel(Text("\n".join(_headlines(result))), title="gramian demo", title_align="left")
    yield _layer_table(result.observations)
    yield Panel(Text(result.sample), title="the model writes", title_align="left")


def _headlines(result: DemoResult) -> Iterator[str]:
    first, last = result.losses[0], sum(result.losses[-20:]) / len(result.losses[-20:])
    yield f"training loss     {first:.3f} -> {last:.3f} nats per byte (mean of the last 20 steps)"
    yield (
        f"validation loss   {result.validation[0][1]:.3f} -> {result.validation_loss:.3f} nats per byte"
        f" = {result.validation_bits_per_byte:.3f} bits per byte"
    )
    yield (
        f"trained           {result.parameters:,} parameters, {result.steps} steps, {result.tokens:,} tokens,"
        f" {result.tokens_per_second:,.0f} tokens/s, {result.seconds:.0f} s"
    )
    if result.stopped_early:
        yield "                  stopped before the learning rate reached zero: the time ran out"
    low, median, high, largest = result.noise.sample_norm_quantiles
    yield (
        f"gradient norms    p10 {low:.3g}, median {median:.3g}, p90 {high:.3g}, max {largest:.3g}"
        f" over {result.noise.samples} single sequences"
    )
    yield f"critical batch    {_batch_advice(result.noise, result.config.batch_size)}"
    seen = result.observations
    ratio = seen.observed_step_seconds / seen.plain_step_seconds
    yield (
        f"observing costs   {ratio:.2f} x a plain step ({1e3 * seen.observed_step_seconds:.0f} ms against"
        f" {1e3 * seen.plain_step_seconds:.0f} ms, medians of this run)"
    )


def _batch_advice(noise: GradientNoise, batch_size: int) -> str:
    """Say what the critical batch size means for the batch size of this run, in one line."""
    if noise.noise_scale is None:
        return f"more than the {noise.samples} sequences measured: noise hides the mean gradient"
    if noise.noise_scale > 2.0 * batch_size:
        advice = "larger batches save steps at little cost in tokens"
    elif noise.noise_scale < 0.5 * batch_size:
        advice = "smaller batches save tokens at little cost in steps"
    else:
        advice = "steps and tokens are in fair balance"
    return f"about {noise.noise_scale:.0f} sequences; at {batch_size}, {advice}"


def _layer_table(seen: ObservationReport) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(
        title="layers at the end of training", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    table.add_column("layer", no_wrap=True)
    headings = ("size", "input\nrms", "zeros", "gradient\nrms", "not\nfinite", "Fisher", "Fisher\n/ size")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    parameters = sum(group.parameters for group in seen.groups)
    for group in seen.groups:
        table.add_row(
            group.layer,
            f"{group.parameters:,}",
            _cell(group.activation_norm, ".3g"),
            _cell(group.zero_fraction, ".1%"),
            _cell(group.gradient_norm, ".2g"),
            str(group.nonfinite),
            _cell(group.fisher_share, ".1%"),
            _cell(group.fisher_share / (group.parameters / parameters), ".2f"),
        )
    table.caption = (
        "size: parameters. input, zeros: what enters the layer. gradient: of one sample's loss at its output.\n"
        "Fisher: share of the trace of the empirical Fisher, where a sample's loss is most sensitive.\n"
        "Fisher / size: that share over the layer's share of the parameters."
    )
    table.caption_justify = "left"
    return table


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _numbers(result: DemoResult) -> dict[str, object]:
    """Everything in `result`, ready for JSON, and the versions behind it; a number that is not finite becomes null."""
    import torch

    numbers = {
        **dataclasses.asdict(result),
        "validation_loss": result.validation_loss,
        "validation_bits_per_byte": result.validation_bits_per_byte,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    return {key: _finite(value) for key, value in numbers.items()}


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
