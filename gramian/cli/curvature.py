"""`gramian curvature CONFIG.toml | --model PATH --text FILE…`: capacity metrics and spectra of every layer of a model.

The model is that of a config (its run's best checkpoint, else fresh weights) on its training data, or a Hugging Face model
folder on text files. Writes a table, curvature.json, and pictures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed, is_out_of_memory, refuse_torchrun
from gramian.cli.config_arguments import positive_integer
from gramian.cli.terminal import Update, in_parts, make_console, make_table, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType

    from gramian.analysis.options import Settings
    from gramian.analysis.subject import Subject

DEFAULT_OUT = Path("runs/curvature")
STAGE_NAMES = {"kfac": "K-FAC", "ggn": "Gauss-Newton matrix", "hessian": "Hessian"}
PARTS = 8
"""Number of progress lines that a stage prints if the output is not a terminal."""
MOST_ROWS = 64
"""Maximum number of layers in the printed table: those with the largest share of the trace."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian curvature` to a parser."""
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a training config")
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--model", metavar="PATH", help="a Hugging Face model folder, in place of a config; nothing is downloaded")
    add("--text", nargs="+", metavar="FILE", help="text files, or folders of them, for --model")
    add("--masked", action="store_true", help="of an encoder: mask 15 %% of the tokens and score those, by the model's own "
        "head or, where it has none, against its input embeddings")  # fmt: skip
    add("--tokens", type=positive_integer, default=1024, metavar="N", help="about how many are read (default: 1024)")
    add("--length", type=positive_integer, metavar="T", help="tokens of a window, with --model (default: 128)")
    add("--batch", type=positive_integer, metavar="B", help="windows of one pass (default: about 1024 tokens)")
    add("--fisher", default="mc", metavar="KIND", help="labels of K-FAC: empirical (the data's), mc (drawn from the model, "
        "default), true (the head exact, else mc)")  # fmt: skip
    add("--damping", type=float, metavar="λ", help="of condition number, log det, effective dimension (default: 0.03)")
    add("--samples", type=float, metavar="N", help="how many the model was trained on: adds the heuristic pac_bayes = "
        "√(trace/N)")  # fmt: skip
    add("--eigenvalues", type=int, default=5, metavar="K", help="largest ones of K-FAC and Gauss-Newton (default: 5)")
    add("--probes", type=int, default=4, metavar="P", help="random vectors of the Gauss-Newton density (default: 4); 0: "
        "K-FAC alone")  # fmt: skip
    add("--steps", type=int, default=16, metavar="S", help="Lanczos steps of each probe (default: 16)")
    add("--hessian", action="store_true", help="both ends of the Hessian's spectrum, too")
    add(
        "--ekfac",
        action="store_true",
        help="EK-FAC's eigenvalues in place of K-FAC's, from a second pass over the data",
    )
    add("--device", metavar="NAME", help="cpu or cuda (default: the config's, else cuda where there is one)")
    add("--dtype", metavar="NAME", help="fp32 or fp64 (default: fp32, and fp64 of a run in fp64)")
    add("--seed", type=int, default=0, metavar="SEED", help="of labels, masks and probes (default: 0)")
    add(
        "--methods", action="store_true", help="write methods.md: a Methods paragraph and the reproducibility checklist"
    )
    add("--out", type=Path, metavar="DIR", help=f"a new folder (default: {DEFAULT_OUT}, numbered)")


def run(arguments: argparse.Namespace) -> int:
    """Measure the curvature of a model, print tables, and write curvature.json and pictures. Returns the exit code.

    Raises:
        RunFailed: if it is interrupted or memory is full; the message says what was written.
        GramianError: if an argument does not fit.
    """
    settings = _settings(arguments)

    from gramian.analysis import plots
    from gramian.analysis.measure import analyse, plan_of
    from gramian.analysis.methods import write_methods
    from gramian.analysis.result_file import FILE, new_folder, write_result

    refuse_torchrun("curvature")
    console = make_console()
    subject = _subject(arguments)
    show(console, *_heading(subject))
    with _argument_named():
        plan = plan_of(subject, settings)
    show(console, *plan.lines())
    plan.check()
    folder = new_folder(arguments.out, DEFAULT_OUT)
    stored: dict[str, Any] = {}

    def store(result: Mapping[str, Any]) -> None:
        write_result(result, folder)
        stored.update(result)

    try:
        result = analyse(subject, settings, lambda name: _stage(console, STAGE_NAMES[name]), store)
        written = [folder / FILE, *(plots.draw(result, folder) if plots.available() else [])]
        if arguments.methods:
            write_methods(result, folder / "methods.md")
            written.append(folder / "methods.md")
    except (KeyboardInterrupt, RuntimeError, MemoryError, GramianError) as problem:
        stored_part = _stored_part(folder, stored)
        if isinstance(problem, KeyboardInterrupt):
            raise RunFailed(f"curvature: interrupted; {stored_part}") from None
        if isinstance(problem, GramianError) or not is_out_of_memory(problem):
            raise
        full = "curvature: out of memory; expected fewer --tokens, or a smaller --batch"
        raise RunFailed(f"{full}; {stored_part}") from None
    show(console, *_report(result))
    if not plots.available():
        show(console, "no pictures: matplotlib is not here; expected gramian[plot]")
    show(console, "written: " + ", ".join(map(str, written)))
    return 0


# ---- arguments -------------------------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> Settings:
    """Make the `Settings` of the analysis; raises a GramianError for arguments that are wrong whatever the model is."""
    for name, choices in (("device", ("cpu", "cuda")), ("dtype", ("fp32", "fp64"))):
        value = getattr(arguments, name)
        if value is not None and value not in choices:
            raise GramianError(f"argument --{name}: {value!r}; expected {' or '.join(choices)}")
    if (arguments.config is None) == (arguments.model is None):
        raise GramianError("curvature: expected either CONFIG.toml or --model PATH --text FILE…")
    if arguments.model is None:
        for name in ("text", "masked", "length"):
            if getattr(arguments, name):
                raise GramianError(f"argument --{name}: is for --model; expected it without CONFIG.toml")
    elif arguments.text is None:
        raise GramianError("argument --text: none given; expected text files for --model")

    from gramian.analysis.options import Settings

    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    with _argument_named():
        return Settings(**{name: value for name, value in given.items() if value is not None})


@contextmanager
def _argument_named() -> Iterator[None]:
    """Context manager: an error that names a field of `Settings` names the option instead."""
    from gramian.analysis.options import Settings

    try:
        yield
    except GramianError as problem:
        named = str(problem).partition(":")[0] in [field.name for field in fields(Settings)]
        raise GramianError(f"argument --{problem}" if named else str(problem)) from None


def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.model is not None:
        from gramian.analysis.model_folder import LENGTH, from_folder

        return from_folder(
            arguments.model,
            arguments.text,
            _device(arguments.device, "auto"),
            arguments.dtype,
            arguments.tokens,
            arguments.batch,
            arguments.length or LENGTH,
            arguments.masked,
            arguments.seed,
        )
    from gramian.analysis.subject import from_config
    from gramian.train.config.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    device = _device(arguments.device, config.run.device)
    return from_config(config, device, arguments.dtype, arguments.tokens, arguments.batch)


def _device(asked: str | None, configured: str) -> torch.device:
    import torch

    name = asked or configured
    if name == "cuda" and not torch.cuda.is_available():
        field = "argument --device" if asked else "run.device"
        raise GramianError(f"{field}: there is no CUDA device here; expected cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


# ---- output ----------------------------------------------------------------------------------------------------------


@contextmanager
def _stage(console: Console, name: str) -> Iterator[Update]:
    """Context manager that shows the progress of a stage: a bar on a terminal, elsewhere at most `PARTS` lines."""
    started = time.perf_counter()

    def line(done: int, total: int, _: str) -> None:
        show(console, f"{name}: {done:,} of {total:,}, {time.perf_counter() - started:.0f} s")

    with progress_bar(console, name) as update:
        yield update if console.is_terminal else in_parts(PARTS, line)
    show(console, f"{name}: {time.perf_counter() - started:.0f} s")


def _stored_part(folder: Path, stored: Mapping[str, Any]) -> str:
    """Describe what curvature.json has after an analysis that ended early; an empty folder is removed."""
    if not stored:
        folder.rmdir()
        return "nothing was written"
    done = " and ".join(name for stage, name in STAGE_NAMES.items() if stage in stored)
    content = "all of it" if stored["complete"] else f"{done}, and says that it is not complete"
    return f"{folder / 'curvature.json'} holds {content}"


def _heading(subject: Subject) -> list[str]:
    model, data = subject.model_facts, subject.data_facts
    fresh = " (no run in run.folder: fresh weights)" if model["weights"] == "fresh" else ""
    return [
        f"{model.get('path', model['kind'])}: {subject.parameters:,} parameters, weights: {model['weights']}{fresh}, "
        f"{model['dtype']}",
        f"{data['windows']:,} of {data['windows_in_all']:,} windows of {data['length']:,}: {subject.tokens:,} tokens, "
        f"{subject.terms:,} loss terms",
        *subject.notes,
    ]


def _report(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _layer_table(result)
    yield _model_table(result)
    kfac, data = result["kfac"], result["data"]
    exact = " but that of the exact head" if result["settings"]["fisher"] == "true" else ""
    limit = f"no side of a layer{exact} has a rank above the {data['tokens']:,} tokens read"
    yield f"loss {kfac['loss']:.4g} nats a term; {limit}"
    coverage = kfac["metrics"]["model"]["coverage"]
    yield (
        f"of the parameters {coverage['kronecker']:.2%} in Kronecker blocks, {coverage['block']:.2%} in exact blocks, "
        f"{coverage['diagonal']:.2%} in diagonals, {coverage['none']:.2%} in none"
    )
    yield from result["notes"]


def _layer_table(result: Mapping[str, Any]) -> RenderableType:
    """Table of the layers: a row per layer with Kronecker factors, in the model's order, and one for all other parameters.

    Of more than `MOST_ROWS` layers those with the smallest traces are in the last row too.
    """
    from gramian.analysis.layer_places import kind, kronecker_layers, short_names

    record, metrics = result["kfac"]["record"]["layers"], result["kfac"]["metrics"]
    total = metrics["model"]["trace"] or math.inf
    names = kronecker_layers(result)
    shown = sorted(names, key=lambda name: -metrics["layers"][name]["trace"])[:MOST_ROWS]
    table = make_table()
    table.add_column("layer", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for head in ("out × in", "trace", "share", "λ_max", "eff. rank", "condition"):
        table.add_column(head, justify="right", no_wrap=True)
    short = short_names(names)
    for name in names:
        if name in shown:
            layer, found = record[name], metrics["layers"][name]
            size = f"{layer['out_dim']:,} × {layer['in_dim']:,}"
            table.add_row(
                short[name],
                kind(layer),
                size,
                f"{found['trace']:.3g}",
                f"{found['trace'] / total:.1%}",
                f"{found['max_eigenvalue']:.3g}",
                f"{found['entropy_rank']:,.0f}",
                f"{found['condition_number']:.2g}",
            )
    rest = [name for name in record if name not in shown]
    if rest:
        kinds = ", ".join(dict.fromkeys(kind(record[name]) for name in rest))
        trace = sum(metrics["layers"][name]["trace"] for name in rest)
        top = max(metrics["layers"][name]["max_eigenvalue"] for name in rest)
        size = f"{sum(record[name]['out_dim'] * record[name]['in_dim'] for name in rest):,}"
        table.add_section()
        table.add_row(f"{len(rest)} other blocks", kinds, size, f"{trace:.3g}", f"{trace / total:.1%}", f"{top:.3g}")
    return table


def _model_table(result: Mapping[str, Any]) -> RenderableType:
    """Table of the model's totals, such as trace and largest eigenvalue: K-FAC beside the Gauss-Newton matrix."""
    from gramian.analysis.layer_places import estimate_name

    model, ggn = result["kfac"]["metrics"]["model"], result.get("ggn")
    table = make_table("whole model", f">{estimate_name(result)}", *[">Gauss-Newton"] * bool(ggn))
    damped = f", λ = {model['damping']:g}"
    rows = [
        ("trace", "trace", ggn and _plus_minus(ggn["trace"])),
        ("largest eigenvalue", "max_eigenvalue", ggn and _largest(ggn["extremes"])),
        ("participation ratio", "participation_ratio", ggn and _number(ggn["participation_ratio"])),
        (f"effective dimension{damped}", "effective_dimension", ggn and _plus_minus(ggn["effective_dimension"])),
        ("effective rank", "entropy_rank", ""),
        (f"condition number{damped}", "condition_number", ""),
    ]
    if "pac_bayes" in model:
        rows.append((f"√(trace/n), n = {_number(result['settings']['samples'])}; no bound", "pac_bayes", ""))
    for name, key, exact in rows:
        table.add_row(name, _number(model[key]), *[exact] * bool(ggn))
    if "hessian" in result:
        ends = result["hessian"]["extremes"]
        table.add_row("Hessian, both ends", f"{ends['smallest']:.4g} … {ends['largest']:.4g}")
    return table


def _plus_minus(estimate: Mapping[str, Any]) -> str:
    error = estimate["standard_error"]
    limit = "≤ " if estimate.get("bound") == "upper" else ""
    return f"{limit}{_number(estimate['value'])}" + ("" if error is None else f" ± {_number(error, 2)}")


def _number(value: float, digits: int = 4) -> str:
    """Format a number to `digits` significant digits, without a power of ten below a billion."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _largest(ends: Mapping[str, Any]) -> str:
    return f"{ends['largest']:.4g}" + ("" if ends["converged"] else " (not converged)")
