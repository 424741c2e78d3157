"""Run the matrix and write it: `python -m tests.zoo [TYPE …] [--columns NAME …] [--workers N]`.

Every type runs in a process of its own, with a limit of time. Rows are written to `matrix.json` as they come, and
docs/reference/models.md is generated from it at the end. After a new release of transformers this is the one command to run.
"""

import argparse
import json
import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.zoo import models_page
from tests.zoo.columns import COLUMNS, cell, kfac_shares
from tests.zoo.tiny_configs import model_class, model_types
from tests.zoo.zoo_models import CannotRun, example, in_double

MATRIX = Path(__file__).with_name("matrix.json")
Row = dict[str, Any]


def row_of(name: str, columns: list[str], known: Row, limit: int) -> Row:
    """The row of one type: how its model was made, and a cell for each column; in this process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kind = model_class(name)
    row = {"class": kind.__name__ if kind else None, **known}
    found: dict[str, Any] = {}
    for column in columns:
        signal.alarm(limit)
        try:
            if column == "K-FAC":
                row["K-FAC"] = {key: round(share, 4) for key, share in kfac_shares(name).items()}
                continue
            one = example(name, **found) if found else example(name, row.get("size"), row.get("inputs"))
            found = {"size": one.size, "inputs": one.inputs}
            row |= {**found, "parameters": sum(p.numel() for p in one.model.parameters())}
            outcome = cell(column, one)
            row.setdefault("cells", {})[column] = [outcome.outcome, outcome.detail]
        except CannotRun as why:
            return {"class": row["class"], "cannot": str(why)}
        except Late:
            row.setdefault("cells", {})[column] = ["late", f"more than {limit} s"]
        except Exception as error:  # of a default configuration that no model can be built from
            row["K-FAC"] = f"{type(error).__name__}: {error}"[:100]
        finally:
            signal.alarm(0)
    row.pop("cannot", None)
    return row


class Late(BaseException):
    """A cell that takes too long; no code that catches exceptions catches it."""


def _late(*_: Any) -> None:
    raise Late


def _work(job: tuple[str, list[str], Row, int]) -> tuple[str, Row]:
    signal.signal(signal.SIGALRM, _late)
    with in_double():
        return job[0], row_of(*job)


def main() -> None:
    """Run the types that are named, or all, and write matrix and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--columns", nargs="+", default=[*COLUMNS, "K-FAC"], choices=[*COLUMNS, "K-FAC"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one cell")
    parser.add_argument("--missing", action="store_true", help="only types without a row")
    options = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    matrix = json.loads(MATRIX.read_text()) if MATRIX.exists() else {"rows": {}}
    matrix["transformers"] = transformers.__version__
    rows, names = matrix["rows"], options.types or model_types()
    if options.missing:
        names = [name for name in names if name not in rows]
    jobs = [(name, options.columns, rows.get(name, {}), options.limit) for name in names]
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        for done, (name, row) in enumerate(pool.imap_unordered(_work, jobs), start=1):
            rows[name] = row
            shown = row.get("cannot") or {column: outcome for column, (outcome, _) in row.get("cells", {}).items()}
            print(f"{done} of {len(jobs)}: {name} {shown}", flush=True)
            MATRIX.write_text(json.dumps({**matrix, "rows": dict(sorted(rows.items()))}, indent=1) + "\n")
    models_page.write(matrix)


if __name__ == "__main__":
    main()
