"""`gramian influence build | query`: which passages of the training text made a model say this.

`build` fits the Fisher of a model to its text and writes an index; `query` computes the influence of every passage on a
completion that the model wrote. Under torchrun the processes share the passages, and the first one prints and writes.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import (
    FAILED_ON_ONE,
    RunFailed,
    is_out_of_memory,
    lost_another,
    only_one_complains,
)
from gramian.cli.config_arguments import positive_integer, seed_number
from gramian.cli.terminal import Update, in_parts, make_console, make_table, progress_bar, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from gramian.influence.corpus import PassageCorpus
    from gramian.influence.open_index import Query, Scores
    from gramian.parallel.process_grid import ProcessGrid
    from gramian.parallel.shared_work import SharedWork

LENGTH = 256
"""Default tokens of a passage of --model."""
PARTS = 8
"""Number of progress lines of a stage if the output is not a terminal."""
SHOWN = 200
"""Characters of a passage in the table."""
STAGES = {
    "factors": "factors", "eigenvalues": "EK-FAC's eigenvalues", "gradients": "compressed gradients", "scores": "scores",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian influence` to a parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="build | query")
    exact: Any = {"description": __doc__, "allow_abbrev": False}
    build = actions.add_parser("build", help="write the index of a model and its text", **exact)
    add = build.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a training config: its run's model and training data")
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--model", metavar="PATH", help="a Hugging Face model folder, in place of a config; nothing is downloaded")
    add("--text", nargs="+", metavar="FILE", help="text files, or folders of them, for --model")
    add("--length", type=positive_integer, metavar="T", help=f"tokens of a passage, with --model (default: {LENGTH})")
    add("--passages", type=positive_integer, metavar="N", help="how many, evenly spaced over the text (default: all)")
    add("--factors", default="ekfac", metavar="KIND", help="ekfac (default) or kfac")
    add("--fisher", default="mc", metavar="KIND", help="labels: mc (drawn from the model, default), true (the head exact, "
        "else mc), empirical (the text's)")  # fmt: skip
    add("--damping", type=float, default=0.1, metavar="δ", help="over each block's mean eigenvalue (default: 0.1)")
    add("--gradients", metavar="SIZE", help="store compressed gradients of all passages in so many bytes, as 200MB")
    add("--memory-budget", metavar="SIZE", help="bytes of the factors")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="parameters that count, such as '*.mlp.*'")
    add("--batch", type=positive_integer, default=8, metavar="B", help="passages of a backward (default: 8)")
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is one)")
    add("--seed", type=seed_number, default=0, metavar="SEED", help="of labels and projections (default: 0)")
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder, or that of a build that was interrupted")
    query = actions.add_parser("query", help="influence of every passage on a completion", **exact)
    add = query.add_argument
    add("index", metavar="INDEX", help="the folder of a build")
    add("--prompt", metavar="TEXT", help="the text before the completion; it is not scored")
    add(
        "--completion",
        metavar="TEXT",
        help="the text that is explained (default: the model's own likeliest continuation)",
    )
    add("--queries", type=Path, metavar="FILE.jsonl", help='many queries, a line each: {"prompt": …, "completion": …}')
    add("--top", type=positive_integer, default=10, metavar="K", help="passages shown on each side (default: 10)")
    add("--exact", action="store_true", help="score every passage from the text, also where gradients are stored")
    add("--self", action="store_true", dest="self_influence", help="also the passages of largest self-influence")
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is one)")
    add("--out", type=Path, metavar="DIR", help="a new folder (default: INDEX/query, numbered)")


def run(arguments: argparse.Namespace) -> int:
    """Build an index, or query one; prints tables and writes files. Returns the exit code.

    Raises:
        RunFailed: if it is interrupted or memory is full; a build goes on where it was when it is run again.
        GramianError: if an argument does not fit.
    """
    from gramian.parallel.world import world

    with world(arguments.device == "cpu", False) as grid:
        return only_one_complains(grid, lambda: _run(arguments, grid))


def _run(arguments: argparse.Namespace, grid: ProcessGrid) -> int:
    from gramian.parallel.shared_work import SharedWork

    console, shared = make_console(quiet=grid.rank > 0), SharedWork(grid)
    try:
        return (_build if arguments.action == "build" else _query)(arguments, console, shared)
    except KeyboardInterrupt:
        more = "; the same command goes on from there" if arguments.action == "build" else ""
        raise RunFailed(f"influence: interrupted{more}") from None
    except GramianError as problem:
        if FAILED_ON_ONE.match(str(problem)):  # the exit code is 1 on all processes, as on the one that failed
            raise RunFailed(f"influence: {problem}") from None
        raise
    except (RuntimeError, MemoryError) as problem:
        if is_out_of_memory(problem):
            raise RunFailed("influence: out of memory; expected a smaller --batch or --memory-budget") from None
        if grid.size == 1 or not lost_another(problem):
            raise
        line = str(problem).splitlines()[0][:200]
        raise RunFailed(f"influence: process {grid.rank} lost another one ({line}); expected all to go on") from None


# ---- build -----------------------------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace, console: Console, shared: SharedWork) -> int:
    if (arguments.config is None) == (arguments.model is None):
        raise GramianError("influence build: expected either CONFIG.toml or --model PATH --text FILE…")
    if arguments.model is not None and not arguments.text:
        raise GramianError("argument --text: none given; expected text files for --model")
    for name in ("text", "length"):
        if arguments.model is None and getattr(arguments, name):
            raise GramianError(f"argument --{name}: is for --model; expected it without CONFIG.toml")

    from gramian.core.byte_amounts import format_bytes
    from gramian.influence.index_builder import BuildOptions, build_index

    with _argument_named():
        options = BuildOptions(
            factors=arguments.factors,
            fisher=arguments.fisher,
            damping=arguments.damping,
            gradients=arguments.gradients,
            memory_budget=arguments.memory_budget,
            only=tuple(arguments.only),
            batch=arguments.batch,
            seed=arguments.seed,
        )
    with shared.together():
        corpus = _corpus(arguments, shared.grid)
    processes = f", shared by {shared.grid.size} processes" * (shared.grid.size > 1)
    show(console, f"{len(corpus):,} passages of {corpus.tokens_NT.shape[1]:,} tokens{processes}")
    started = time.perf_counter()
    with _argument_named(), _stages(console) as update:
        folder = build_index(corpus, arguments.out, options, update, shared.grid)
    rank = f", compressed gradients of rank {folder.facts['rank']}" if "rank" in folder.facts else ""
    seconds = time.perf_counter() - started
    show(console, f"{folder.path}: {format_bytes(folder.nbytes)}{rank}, {seconds:.0f} s")
    return 0


def _corpus(arguments: argparse.Namespace, grid: ProcessGrid) -> PassageCorpus:
    from gramian.influence.corpus import from_config, from_folder

    device = _device(arguments.device, grid)
    if arguments.model is not None:
        return from_folder(arguments.model, arguments.text, device, arguments.length or LENGTH, arguments.passages)
    return from_config(arguments.config, arguments.overrides, device, arguments.passages)


def _device(asked: str | None, grid: ProcessGrid) -> torch.device:
    """The device of this process: the CPU, or one GPU for each process of a host."""
    if asked not in (None, "cpu", "cuda"):
        raise GramianError(f"argument --device: {asked!r}; expected cpu or cuda")
    if asked == "cuda" and grid.device.type != "cuda":
        raise GramianError("argument --device: there is no CUDA device here; expected cpu")
    return grid.device


@contextmanager
def _argument_named() -> Iterator[None]:
    """Context manager: an error that names an option of the build names the argument instead."""
    try:
        yield
    except GramianError as problem:
        known = "factors|fisher|damping|gradients|memory_budget|only|batch|out|top"
        found = re.match(rf"(process \d+: )?({known})(:.*)", str(problem), re.DOTALL)
        if found is None:
            raise
        before, name, rest = found.groups(default="")
        raise GramianError(f"{before}argument --{name.replace('_', '-')}{rest}") from None


@contextmanager
def _stages(console: Console) -> Iterator[Any]:
    """Context manager that shows progress: a bar with the stage on a terminal, elsewhere at most `PARTS` lines a stage."""
    started = time.perf_counter()
    lines: dict[str, Update] = {}

    def line(stage: str) -> Update:
        return in_parts(
            PARTS, lambda done, total, _: show(console, f"{STAGES[stage]}: {done:,} of {total:,}, "
            f"{time.perf_counter() - started:.0f} s")
        )  # fmt: skip

    with progress_bar(console, "influence") as bar:

        def update(stage: str, done: int, total: int) -> None:
            if console.is_terminal:
                bar(done, total, STAGES[stage])
            else:
                lines.setdefault(stage, line(stage))(done, total)

        yield update


# ---- query -----------------------------------------------------------------------------------------------------------


def _query(arguments: argparse.Namespace, console: Console, shared: SharedWork) -> int:
    from gramian.analysis.result_file import new_folder
    from gramian.influence.corpus import from_index
    from gramian.influence.findings import find
    from gramian.influence.index_folder import IndexFolder
    from gramian.influence.open_index import Index, Query

    if arguments.queries is None and arguments.prompt is None and arguments.completion is None:
        raise GramianError("influence query: expected --prompt, --completion or --queries FILE.jsonl")
    with shared.together():
        folder = IndexFolder.open(arguments.index, "argument INDEX")
        corpus = from_index(folder, _device(arguments.device, shared.grid))
    asked = shared.first(lambda: [[one.prompt, one.completion, one.ids] for one in _queries(arguments, corpus)])
    queries = [Query(prompt, completion, None if ids is None else tuple(ids)) for prompt, completion, ids in asked]
    # before the work, which would be lost without it
    out = Path(shared.first(lambda: str(new_folder(arguments.out, folder.path / "query"))))
    started = time.perf_counter()
    try:
        with _stages(console) as update:
            source = "passages" if arguments.exact else "auto"
            answers = Index(corpus, folder.path, shared.grid).ask(queries)
            found, scores = find(answers, corpus, arguments.top, source, arguments.self_influence, update)
    except BaseException:
        if shared.grid.rank == 0:
            out.rmdir()
        raise
    found["seconds"] = time.perf_counter() - started
    with shared.together():
        if shared.grid.rank == 0:
            _write(out, found, scores)
    for query in found["queries"]:
        show(console, _table(query))
    show(console, f"{found['passages']:,} passages, {len(queries)} queries, {found['seconds']:.1f} s; written: {out}")
    return 0


def _queries(arguments: argparse.Namespace, corpus: PassageCorpus) -> Iterator[Query]:
    from gramian.influence.open_index import Query, continued

    if arguments.queries is None:
        prompt = arguments.prompt or ""
        completion = arguments.completion
        yield continued(corpus, prompt) if completion is None else Query(prompt, completion)
        return
    if arguments.prompt is not None or arguments.completion is not None:
        raise GramianError("argument --queries: beside --prompt or --completion; expected one or the other")
    try:
        lines = arguments.queries.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise GramianError(
            f"argument --queries: {arguments.queries} cannot be read; expected a file of JSON lines"
        ) from None
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        try:
            one = json.loads(line)
            prompt, completion = one.get("prompt", ""), one.get("completion")
            if not isinstance(prompt, str) or not isinstance(completion, str | None):
                raise TypeError
        except (ValueError, AttributeError, TypeError):
            what = 'expected {"prompt": "…", "completion": "…"}'
            raise GramianError(f"argument --queries: line {number} of {arguments.queries}; {what}") from None
        yield continued(corpus, prompt) if completion is None else Query(prompt, completion)


def _write(out: Path, found: Mapping[str, Any], scores: Scores) -> None:
    from safetensors.torch import save_file

    from gramian.core.durable_files import replace_text
    from gramian.influence.influence_page import page_html

    replace_text(out / "influence.json", json.dumps(found, indent=1) + "\n")
    replace_text(out / "influence.html", page_html("Influence", found))
    more = {} if scores.self_N is None else {"self_influence": scores.self_N.contiguous()}
    save_file({"scores": scores.values_QN.contiguous(), **more}, out / "scores.safetensors")


def _table(query: Mapping[str, Any]) -> Any:
    said = " ".join(f"{query['prompt']}⟦{query['completion']}⟧".split())
    table = make_table(">score", ">passage", "text", title=f"{said[-SHOWN:]}  ({query['nats']:.3f} nats)")
    for side in ("likelier", "less_likely"):
        for one in query[side]:
            words = " ".join("".join(one["tokens"]).split())
            table.add_row(f"{one['score']:.4g}", f"{one['passage']:,}", words[:SHOWN])
        table.add_section()
    return table
