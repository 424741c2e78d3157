"""Run the matrix and write it: `python -m tests.zoo [ROW …] [--columns NAME …] [--workers N]`.

Every row runs in a process of its own, with a limit of time for each cell, and in turns of the kinds of models, so that a part
of a run has all of them. Cells are written to `matrix.json` as they come, and the page docs/reference/models.md is generated
from it at the end. After a new release of transformers this is the one command to run.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.zoo import models_page
from tests.zoo.columns import COLUMNS, Study, kfac_shares
from tests.zoo.tiny_configs import model_class
from tests.zoo.zoo_models import CannotRun, example, in_double, names, of_torch

MATRIX = Path(__file__).with_name("matrix.json")
_TORCH = torch.__version__.split("+")[0]
Row = dict[str, Any]


def row_of(name: str, columns: list[str], known: Row, limit: int) -> Row:
    """What a run found out about one row: how its model was made, and a cell for each column; in this process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    row: Row = {"class": _class(name), "cells": {}}
    study = None
    for column in columns:
        if not has_cell(name, column):
            continue
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            if column == "K-FAC":
                row["K-FAC"] = {key: round(share, 4) for key, share in kfac_shares(name).items()}
                continue
            study = study or Study(example(name, known.get("size"), known.get("inputs")))
            one = study.one
            row |= {
                "size": one.size,
                "inputs": one.inputs,
                "parameters": sum(p.numel() for p in one.model.parameters()),
            }
            found = study.cell(column)
            row["cells"][column] = [found.outcome, found.detail]
        except CannotRun as why:
            return {"class": row["class"], "cannot": str(why)}
        except Late:
            row["cells"][column] = ["late", f"more than {limit} s of CPU"]
        except Exception as error:  # of a default configuration that no model can be built from
            row["K-FAC"] = f"{type(error).__name__}: {error}"[:100]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return row


def has_cell(name: str, column: str) -> bool:
    """Whether a row has a cell in a column."""
    return column == "K-FAC" or not (only := COLUMNS[column].only) or name in only


def _class(name: str) -> str | None:
    kind = None if of_torch(name) else model_class(name)
    return kind.__name__ if kind else None


class Late(BaseException):
    """A cell that takes too long; no code that catches exceptions catches it."""


def _late(*_: Any) -> None:
    raise Late


def _work(job: tuple[str, list[str], Row, int]) -> tuple[str, Row]:
    signal.signal(signal.SIGPROF, _late)
    with in_double():
        return job[0], row_of(*job)


def in_turns(rows: list[str]) -> list[str]:
    """The rows, one of each kind after the other: layers, nets, and types by what their class is for."""
    kinds: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in rows:
        kind = name.split(".")[0] if of_torch(name) else re.sub(".*?(For[A-Z].*|Model|$)", r"\1", _class(name) or "")
        kinds[kind].append((len(kinds[kind]), name))
    return [name for _, name in sorted((place / len(own), name) for own in kinds.values() for place, name in own)]


def merge(into: dict[str, Row], found: dict[str, Row]) -> None:
    """Put the cells that a run found into the rows of a matrix; those of other columns stay."""
    for name, row in found.items():
        cells = into.get(name, {}).get("cells", {}) | row.get("cells", {})
        into[name] = row if "cannot" in row else {**into.get(name, {}), **row, "cells": cells}
        if "cannot" not in row:
            into[name].pop("cannot", None)


def write(path: Path, found: dict[str, Row]) -> dict[str, Any]:
    """Merge rows into a file as it is now, and return all that it has."""
    matrix = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    merge(matrix["rows"], found)
    matrix = {"rows": dict(sorted(matrix["rows"].items())), "transformers": transformers.__version__, "torch": _TORCH}
    path.write_text(json.dumps(matrix, indent=1) + "\n")
    return matrix


def main() -> None:
    """Run the rows that are named, or all, and write matrix and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--columns", nargs="+", default=[*COLUMNS, "K-FAC"], choices=[*COLUMNS, "K-FAC"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=120, help="seconds of CPU for one cell")
    parser.add_argument("--missing", action="store_true", help="only rows without a cell in one of the columns")
    parser.add_argument("--into", type=Path, default=MATRIX, help="where cells are written")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="run nothing: merge the cells of these files")
    options = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    for path in options.merge:
        write(MATRIX, json.loads(path.read_text())["rows"])
    known = json.loads(MATRIX.read_text())["rows"] if MATRIX.exists() else {}
    rows = in_turns(options.rows or names()) if not options.merge else []
    if options.missing:
        rows = [
            name
            for name in rows
            if any(has_cell(name, one) and not _has(known.get(name, {}), one) for one in options.columns)
        ]
    jobs = [(name, options.columns, known.get(name, {}), options.limit) for name in rows]
    with in_double():  # what a column imports is imported once, before the processes of the rows start
        for column in [one for one in options.columns if one in COLUMNS] if jobs else []:
            Study(example("net.ViT")).cell(column)
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        for done, (name, row) in enumerate(pool.imap_unordered(_work, jobs), start=1):
            write(options.into, {name: row})
            shown = row.get("cannot") or {column: outcome for column, (outcome, _) in row["cells"].items()}
            print(f"{done} of {len(jobs)}: {name} {shown}", flush=True)
    models_page.write(json.loads(MATRIX.read_text()))


def _has(row: Row, column: str) -> bool:
    return "cannot" in row or column in row or column in row.get("cells", {})


if __name__ == "__main__":
    main()
