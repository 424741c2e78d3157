"""Tables of a run's plans: memory of the device, copies on the host, clipping, curvature.

The clipping plan comes from the events. The others are functions of config and record and are computed again; nothing is
allocated. A plan that cannot be computed here, such as that of a model folder that is gone, is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.report.panel import Panel, PanelTable
from gramian.report.run_data import RunData
from gramian.train.config.config import Config, load_config

SECTION = "Plans"
UNLIMITED = 1 << 60
"""Bytes of a device on which every strategy fits, because the plan is shown and nothing is decided."""
NOT_HERE = (GramianError, OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError)
"""What computing a plan may raise for a config, a model folder or a teacher that is not here, or not of this version."""


def plan_panels(runs: Sequence[RunData]) -> list[Panel]:
    """The plans of all runs that are known, each a table."""
    found = []
    for run in runs:
        name = f", {run.name}" if len(runs) > 1 else ""
        for title, table, not_covered in _plans(run):
            columns = tuple(table["columns"])
            rows = [dict(zip(columns, row, strict=False)) for row in table["rows"]]
            note = " ".join(map(str, table["notes"]))
            private = (run.name,) if not_covered else ()
            found.append(
                Panel(SECTION, title + name, PanelTable(columns, rows), note=note, not_covered=private, run=run.name)
            )
    return found


def _plans(run: RunData) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """(title, {"columns", "rows", "notes"}, whether ε does not cover it) of every plan of a run."""
    try:
        config = load_config(run.path / "config.toml")
    except GramianError:
        config = None
    for title, plan in (("Device memory", _memory), ("Curvature (K-FAC) memory", _curvature)):
        try:
            table = None if config is None else plan(run, config)
        except NOT_HERE:
            table = None
        if table is not None:
            yield title, table, False
    host = run.record.get("host_memory")
    if isinstance(host, Mapping) and all(
        isinstance(host.get(key), int) for key in ("snapshots", "bytes_of_one", "bytes")
    ):
        row = [str(host["snapshots"]), format_bytes(host["bytes_of_one"]), format_bytes(host["bytes"])]
        columns = ["snapshots", "bytes of one", "bytes with one being written"]
        yield "Copies of the state in host memory", {"columns": columns, "rows": [row], "notes": []}, False
    clipping = _clipping(run)
    if clipping is not None:
        yield "Clipping", clipping, True
    analysed = run.curvature.get("plan") if run.curvature is not None else None
    stages = analysed.get("stages") if isinstance(analysed, Mapping) else None
    if isinstance(stages, Mapping) and all(isinstance(count, int) for count in stages.values()):
        rows = [[str(stage), format_bytes(count)] for stage, count in stages.items()]
        yield "Memory of the curvature analysis", {"columns": ["stage", "bytes"], "rows": rows, "notes": []}, False


def _clipping(run: RunData) -> Mapping[str, Any] | None:
    """The clipping plan that the run logged as an event; None if it did not, or if that is damaged."""
    for event in reversed(run.events):
        plans = event.get("plans")
        table = plans.get("clipping") if isinstance(plans, Mapping) else None
        if isinstance(table, Mapping) and all(isinstance(table.get(key), list) for key in ("columns", "rows", "notes")):
            return {**table, "columns": [*map(str, table["columns"])]} if _is_text(table["rows"]) else None
    return None


def _is_text(rows: Sequence[Any]) -> bool:
    return all(isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in rows)


def _device(run: RunData) -> str:
    """The device of a run, "cuda" or "cpu": record.json has a GPU's name, which has a space, or the host's architecture."""
    return "cuda" if " " in str(run.record.get("device", "")) else "cpu"


def _memory(run: RunData, config: Config) -> Mapping[str, Any] | None:
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of

    _refuse_missing(config)
    needs = needs_of(config, int(run.record["vocabulary"]), run.record["precision"], _device(run))
    decision = decide(needs, int(run.record["processes"]), UNLIMITED, config.parallel.strategy)
    rows = [[*row.cells()] for row in decision.rows]
    notes = ["Planned from the config; memory of clipping and K-FAC is not counted. Bytes of one device, by strategy."]
    return {"columns": ["part", "arithmetic", *map(str, decision.columns)], "rows": rows, "notes": notes}


def _curvature(run: RunData, config: Config) -> Mapping[str, Any] | None:
    if not config.has_curvature or config.model.kind == "huggingface":
        return None
    from gramian.train.build.memory_needs import plan_run_curvature
    from gramian.train.loop.precision import Precision

    numbers = Precision(run.record["precision"], _device(run))
    vocabulary, processes = int(run.record["vocabulary"]), int(run.record["processes"])
    plan = plan_run_curvature(config, vocabulary, numbers, _device(run), processes)
    return cast("Mapping[str, Any]", plan.grouped_table().facts())


def _refuse_missing(config: Config) -> None:
    """Raise if the folder of the model or of a live teacher is not here, before a library looks for it on a network."""
    paths = [config.model.path] if config.model.kind == "huggingface" else []
    paths += [config.teacher.path] if config.teacher is not None and config.teacher.source == "live" else []
    if any(path is None or not Path(path).is_dir() for path in paths):
        raise OSError("a model folder is not here")
