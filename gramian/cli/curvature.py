"""`gramian curvature CONFIG.toml | --model PATH --text FILE…`: capacity metrics, spectra, a report of every layer."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli import RunFailed
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType

    from gramian.analysis.options import Settings
    from gramian.analysis.subject import Subject

DEFAULT_OUT = Path("runs/curvature")
STAGES = {"kfac": "K-FAC", "ggn": "Gauss-Newton matrix", "hessian": "Hessian"}
PARTS = 8
"""Lines of progress of a stage, where the output is not a terminal."""
MOST_ROWS = 64
"""Layers in the table; of more, those with the largest share of the trace."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "curvature",
        help="capacity metrics and spectra of a model's curvature, layer by layer",
        description="Curvature of the model of a config (its run's best checkpoint, else fresh) on its training data, or of a "
        "Hugging Face model folder on text files: a table, curvature.json, and pictures.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a training config")
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--model", metavar="PATH", help="a Hugging Face model folder, in place of a config; nothing is downloaded")
    add("--text", nargs="+", metavar="FILE", help="text files, or folders of them, for --model")
    add("--masked", action="store_true", help="of an encoder: mask 15 %% of the tokens and score those, by the model's own "
        "head or, where it has none, against its input embeddings")  # fmt: skip
    add("--tokens", type=int, default=1024, metavar="N", help="about how many are read (default: 1024)")
    add("--length", type=int, metavar="T", help="tokens of a window, with --model (default: 128)")
    add("--batch", type=int, metavar="B", help="windows of one pass (default: about 1024 tokens)")
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
        "--ekfac", action="store_true", help="EK-FAC's eigenvalues in place of K-FAC's; keeps every token until the end"
    )
    add("--device", metavar="NAME", help="cpu or cuda (default: the config's, else cuda where there is one)")
    add("--dtype", metavar="NAME", help="fp32 or fp64 (default: fp32, and fp64 of a run in fp64)")
    add("--seed", type=int, default=0, metavar="SEED", help="of labels, masks and probes (default: 0)")
    add(
        "--methods", action="store_true", help="write methods.md: a Methods paragraph and the reproducibility checklist"
    )
    add("--out", type=Path, metavar="DIR", help=f"a new folder (default: {DEFAULT_OUT}, numbered)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    settings = _settings(arguments)

    from gramian.analysis import plots
    from gramian.analysis.measure import analyse, plan_of
    from gramian.analysis.methods import write_methods
    from gramian.analysis.result_file import FILE, new_folder, write_result
    from gramian.cli.terminal import console
    from gramian.parallel.world import started_by_torchrun

    if started_by_torchrun():
        raise GramianError("curvature: is for one process; expected no torchrun")
    out = console()
    subject = _subject(arguments)
    for line in _heading(subject):
        out.print(line, markup=False, soft_wrap=True)
    plan = plan_of(subject, settings)
    for line in plan.lines():
        out.print(line, markup=False, soft_wrap=True)
    plan.check()
    folder = new_folder(arguments.out, DEFAULT_OUT)
    kept: dict[str, Any] = {}

    def keep(result: Mapping[str, Any]) -> None:
        write_result(result, folder)
        kept.update(result)

    try:
        result = analyse(subject, settings, lambda name: _stage(out, STAGES[name]), keep)
        written = [folder / FILE, *(plots.draw(result, folder) if plots.available() else [])]
        if arguments.methods:
            write_methods(result, folder / "methods.md")
            written.append(folder / "methods.md")
    except KeyboardInterrupt:
        raise RunFailed(f"curvature: interrupted; {_left(folder, kept)}") from None
    except (RuntimeError, MemoryError) as problem:
        left = _left(folder, kept)
        if not _full(problem):
            raise
        raise RunFailed(f"curvature: out of memory; expected fewer --tokens, or a smaller --batch; {left}") from None
    except GramianError:
        _left(folder, kept)
        raise
    for part in _report(result):
        out.print(part, markup=False, soft_wrap=isinstance(part, str))
    if not plots.available():
        out.print("no pictures: matplotlib is not here; expected gramian[plot]", markup=False, soft_wrap=True)
    out.print("written: " + ", ".join(map(str, written)), markup=False, soft_wrap=True)
    return 0


# ---- what is asked for -----------------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> Settings:
    """Arguments that need no model.

    Raises:
        GramianError: naming the first that does not fit.
    """
    for name in ("tokens", "length", "batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise GramianError(f"argument --{name}: {value}; expected at least 1")
    for name, accepted in (("device", ("cpu", "cuda")), ("dtype", ("fp32", "fp64"))):
        value = getattr(arguments, name)
        if value is not None and value not in accepted:
            raise GramianError(f"argument --{name}: {value!r}; expected {' or '.join(accepted)}")
    if (arguments.config is None) == (arguments.model is None):
        raise GramianError("curvature: expected either CONFIG.toml or --model PATH --text FILE…")
    if arguments.model is None:
        for name in ("text", "masked", "length"):
            if getattr(arguments, name):
                raise GramianError(f"argument --{name}: is for --model; expected it without CONFIG.toml")
    elif arguments.text is None:
        raise GramianError("argument --text: none given; expected text files for --model")

    from gramian.analysis.options import DAMPING, Settings

    try:
        return Settings(
            fisher=arguments.fisher,
            damping=DAMPING if arguments.damping is None else arguments.damping,
            eigenvalues=arguments.eigenvalues,
            probes=arguments.probes,
            steps=arguments.steps,
            hessian=arguments.hessian,
            ekfac=arguments.ekfac,
            samples=arguments.samples,
            seed=arguments.seed,
        )
    except GramianError as problem:
        raise GramianError(f"argument --{problem}") from None


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


# ---- what is told ----------------------------------------------------------------------------------------------------


@contextmanager
def _stage(out: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    from gramian.cli.terminal import bar

    started, parts = time.perf_counter(), 1

    def told(done: int, total: int) -> None:
        nonlocal parts
        progress(done, total)
        if not out.is_terminal and PARTS * done >= parts * total and done < total:
            parts = PARTS * done // total + 1
            out.print(f"{name}: {done:,} of {total:,}, {time.perf_counter() - started:.0f} s", markup=False)

    with bar(out, name) as progress:
        yield told
    out.print(f"{name}: {time.perf_counter() - started:.0f} s", markup=False)


def _left(folder: Path, kept: Mapping[str, Any]) -> str:
    """What is on disk after all; a folder with nothing in it goes again."""
    if not kept:
        folder.rmdir()
        return "nothing was written"
    done = " and ".join(name for stage, name in STAGES.items() if stage in kept)
    whole = "all of it" if kept["complete"] else f"{done}, and says that it is not complete"
    return f"{folder / 'curvature.json'} holds {whole}"


def _full(problem: Exception) -> bool:
    import torch

    told = "can't allocate memory" in str(problem)
    return told or isinstance(problem, torch.OutOfMemoryError | MemoryError)


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
    yield _layers(result)
    yield _whole(result)
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


def _layers(result: Mapping[str, Any]) -> RenderableType:
    """A row per Kronecker block, in the model's order; the others together."""
    from rich import box
    from rich.table import Table

    from gramian.analysis.layer_places import kind, kronecker_layers, short_names

    record, metrics = result["kfac"]["record"]["layers"], result["kfac"]["metrics"]
    whole = metrics["model"]["trace"] or math.inf
    names = kronecker_layers(result)
    shown = sorted(names, key=lambda name: -metrics["layers"][name]["trace"])[:MOST_ROWS]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for head in ("out × in", "trace", "share", "λ_max", "eff. rank", "condition"):
        table.add_column(head, justify="right", no_wrap=True)
    short = short_names(names)
    for name in names:
        if name in shown:
            layer, found = record[name], metrics["layers"][name]
            size = f"{layer['out_dim']:,} × {layer['in_dim']:,}"
            table.add_row(short[name], kind(layer), size, *_cells(found, whole))
    rest = [name for name in record if name not in shown]
    if rest:
        kinds = ", ".join(dict.fromkeys(kind(record[name]) for name in rest))
        trace = sum(metrics["layers"][name]["trace"] for name in rest)
        top = max(metrics["layers"][name]["max_eigenvalue"] for name in rest)
        size = f"{sum(record[name]['out_dim'] * record[name]['in_dim'] for name in rest):,}"
        table.add_section()
        table.add_row(f"{len(rest)} others", kinds, size, f"{trace:.3g}", f"{trace / whole:.1%}", f"{top:.3g}")
    return table


def _cells(found: Mapping[str, Any], whole: float) -> list[str]:
    return [
        f"{found['trace']:.3g}",
        f"{found['trace'] / whole:.1%}",
        f"{found['max_eigenvalue']:.3g}",
        f"{found['entropy_rank']:,.0f}",
        f"{found['condition_number']:.2g}",
    ]


def _whole(result: Mapping[str, Any]) -> RenderableType:
    """The whole model: K-FAC beside the Gauss-Newton matrix."""
    from rich import box
    from rich.table import Table

    from gramian.analysis.layer_places import estimate_name

    model, ggn = result["kfac"]["metrics"]["model"], result.get("ggn")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("whole model", estimate_name(result), "Gauss-Newton")[: 3 if ggn else 2]:
        table.add_column(name, justify="left" if name == "whole model" else "right", no_wrap=True)
    rows = {
        "trace": (_number(model["trace"]), ggn and _plus_minus(ggn["trace"])),
        "largest eigenvalue": (_number(model["max_eigenvalue"]), ggn and _largest(ggn["extremes"])),
        "participation ratio": (_number(model["participation_ratio"]), ggn and _number(ggn["participation_ratio"])),
        f"effective dimension, λ = {model['damping']:g}": (
            _number(model["effective_dimension"]),
            ggn and _plus_minus(ggn["effective_dimension"]),
        ),
        "effective rank": (_number(model["entropy_rank"]), "" if ggn else None),
        f"condition number, λ = {model['damping']:g}": (_number(model["condition_number"]), "" if ggn else None),
    }
    if "pac_bayes" in model:
        name = f"√(trace/n), n = {_number(result['settings']['samples'])}; no bound"
        rows[name] = (_number(model["pac_bayes"]), "" if ggn else None)
    for name, (kfac, exact) in rows.items():
        table.add_row(name, kfac, *([exact] if exact is not None else []))
    if "hessian" in result:
        ends = result["hessian"]["extremes"]
        table.add_row("Hessian, both ends", f"{ends['smallest']:.4g} … {ends['largest']:.4g}")
    return table


def _plus_minus(told: Mapping[str, Any]) -> str:
    error = told["standard_error"]
    limit = "≤ " if told.get("bound") == "upper" else ""
    return f"{limit}{_number(told['value'])}" + ("" if error is None else f" ± {_number(error, 2)}")


def _number(value: float, digits: int = 4) -> str:
    """So many digits, and no power of ten below a billion."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _largest(ends: Mapping[str, Any]) -> str:
    return f"{ends['largest']:.4g}" + ("" if ends["converged"] else " (not converged)")
