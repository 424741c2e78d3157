"""The tables of `optimizer_race` in docs/concepts/kfac_optimizer.md, made from benchmarks/results/optimizer_race.json.

Writes what stands between `<!-- race -->` and `<!-- /race -->`; a test compares the page with it.
"""

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._timing import RESULTS
from benchmarks.optimizer_trials import best_trial, key_of

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "kfac_optimizer.md"
BEGIN, END = "<!-- race -->\n", "<!-- /race -->"
PROBLEMS = {
    "bytes": ("GPT 6 × 384, bytes; KFAC's recipe was searched here", 800, 4),
    "bpe": ("GPT 8 × 512, BPE of 8,192; one epoch", 1459, 3),
    "autoencoder": ("MNIST autoencoder; cross entropy per image", 1200, 2),
    "cnn": ("MNIST CNN; cross entropy", 1200, 4),
}
"""{problem: (title, steps, digits of a loss)}."""
NAMES = {
    "kfac": "gramian.optim.KFAC",
    "muon": "Muon",
    "adamw": "AdamW",
    "soap": "SOAP",
    "soap-1024": "SOAP, sides up to 1,024",
    "shampoo": "Shampoo",
    "sgd": "SGD, Nesterov",
}


def tables(rows: list[dict[str, Any]]) -> str:
    """A table for each problem: setting of the best trial, number of trials, loss of each seed, seconds alone on the GPU."""
    parts = []
    for problem, (title, steps, digits) in PROBLEMS.items():
        lines = []
        for name, label in NAMES.items():
            runs = runs_of(rows, problem, name)
            if not runs:
                continue
            full = [
                r for r in rows if (r["optimizer"], r["problem"], r["steps"], r["seed"]) == (name, problem, steps, 0)
            ]
            trials = len({key_of({**row, "compiled": True}) for row in full})
            seconds = [row["seconds"] for row in runs if row["compiled"] and row["seconds"] is not None]
            losses = ", ".join(f"{row['loss']:.{digits}f}" for row in runs)
            lines.append(
                (
                    statistics.mean(row["loss"] if math.isfinite(row["loss"]) else math.inf for row in runs),
                    f"| {label} | {_setting(runs[0])} | {trials} | {losses} | {_seconds(seconds)} |",
                )
            )
        head = f"| {title}, {steps:,} steps | best setting | trials | loss, one a seed | seconds |\n|---|---|---|---|---|\n"
        parts.append(head + "\n".join(line for _, line in sorted(lines)) + "\n")
    return "\n".join(parts)


def runs_of(rows: list[dict[str, Any]], problem: str, name: str) -> list[dict[str, Any]]:
    """The runs of the best trial of an optimizer, of every seed that there is, first seed first; KFAC's are of its defaults."""
    best = best_trial(rows, problem, PROBLEMS[problem][1], name)
    if best is None:
        return []
    found: dict[int, dict[str, Any]] = {}
    for row in rows:  # compiled or not: the losses are comparable, the seconds are not
        if key_of({**row, "seed": 0, "compiled": True}) == key_of(asdict(best)) and not found.get(row["seed"], {}).get(
            "compiled"
        ):
            found[row["seed"]] = row
    return [found[seed] for seed in sorted(found)]


def _setting(row: dict[str, Any]) -> str:
    rest = f", rest {_rate(row['rest'])}" if row["rest"] else ""
    second = "β₂" if row["optimizer"] in ("adamw", "soap", "soap-1024") else "momentum"
    return f"lr {_rate(row['lr'])}{rest}, {second} {row['beta']:g}, warm-up {row['warmup']}, decay {row['decay']:g}"


def _rate(value: float) -> str:
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") if value < 0.01 else f"{value:g}"


def _seconds(seconds: list[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds) or "–"


def page(text: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = json.loads((RESULTS / "optimizer_race.json").read_text())["results"]
    return f"{before}{BEGIN}{tables(rows)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
