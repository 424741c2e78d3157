"""Is distillation worth it? A teacher, students with and without it, temperatures, and Goose beside its twin; with seeds.

Everything is trained by the training loop on the embedded corpus, bytes as tokens, in windows of one length. Scored is the last
state, by the non-overlapping perplexity on the first windows of the validation data; what is written beside a mean is the
least and the most of the seeds. Parts, each callable by itself with --only, all in one JSON:

    teacher       a GPT, and the cache of its hidden states; all other parts but "scan" need it
    student       a small GPT distilled at T = 2 and at 1, the same with cross entropy alone, and that again for as long as
                  distillation took
    temperature   fixed at 1, 1.5, 2 and 4, a schedule, learned, an adversary's; final T beside what rates alone would give
    goose         Goose, its dense twin and the GPT of the same shape, each distilled at T = 1 and not: the ternary tax
    scan          Goose with the seed's recurrence put back: {eps, exact} scan × {one, log-spaced} decays × {spikes, identity}

Runs stay in --folder, with what was found so far, and are not repeated. --tiny is everything in seconds on a CPU, and means
nothing. Draws benchmarks/figures/distill_evidence.png if matplotlib is there.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._distill_runs import H200, ON_GPU, TINY, Bench, eps_scan_back, over_seeds, scalar_decay
from benchmarks._timing import RESULTS, write

TEMPERATURES: dict[str, dict[str, Any]] = {
    "fixed 1": {"temperature": 1.0},
    "fixed 1.5": {"temperature": 1.5},
    "fixed 2": {"temperature": 2.0},
    "fixed 4": {"temperature": 4.0},
    "schedule 4 to 1": {"temperature": 4.0, "temperature_kind": "schedule", "temperature_end": 1.0},
    "learned from 2": {"temperature_kind": "learnable"},
    "adversary from 2": {"temperature_kind": "adversarial"},
}
KINDS: dict[str, dict[str, Any]] = {
    "GPT": {"kind": "gpt"},
    "dense twin": {"kind": "goose", "spikes": False},
    "Goose": {"kind": "goose", "spikes": True},
}


def teacher(bench: Bench) -> dict[str, Any]:
    found = bench.teacher()
    cache = found["cache"]
    print(
        f"  teacher: {found['parameters']:,} parameters, perplexity {cache['best_perplexity']:.3f} at step "
        f"{cache['best_step']}, {found['seconds']:.0f} s; cache {cache['bytes_per_token']} bytes a token, "
        f"{cache['seconds']:.0f} s"
    )
    return found


def student(bench: Bench) -> dict[str, Any]:
    steps, seeds = bench.scale.steps["student"], bench.scale.seeds["student"]
    best = bench.require_teacher()["cache"]
    told: dict[str, dict[str, Any]] = {
        "distilled": {"distilled": True},
        "distilled, T = 1": {"distilled": True, "temperature": 1.0},
        "CE": {"distilled": False},
    }
    both = {
        name: over_seeds(
            [
                bench.run(bench.student_config(f"student-{name.replace(', T = ', '-')}-{s}", steps, s, **how))
                for s in seeds
            ]
        )
        for name, how in told.items()
    }
    # As many steps with cross entropy alone as fit into the time of distillation; its schedule is stretched with them.
    pairs = zip(both["distilled"]["runs"], both["CE"]["runs"], strict=True)
    slower = [one["seconds"] / other["seconds"] for one, other in pairs]
    both["CE, as long"] = over_seeds(
        [
            bench.run(
                bench.student_config(f"student-CE-long-{s}", max(steps, round(steps * times)), s, distilled=False)
            )
            for s, times in zip(seeds, slower, strict=True)
        ]
    )
    tell(both)
    print(
        f"  a distilled run takes {statistics.fmean(slower):.2f} × the time of one with cross entropy alone; "
        f"the teacher has {best['best_perplexity']:.3f}"
    )
    return {"teacher_perplexity": best["best_perplexity"], "seconds_distilled_over_CE": slower, "rows": both}


def temperature(bench: Bench) -> dict[str, Any]:
    bench.require_teacher()
    steps, seeds = bench.scale.steps["temperature"], bench.scale.seeds["temperature"]
    rows = {}
    for name, told in TEMPERATURES.items():
        place = f"temperature-{name.replace(' ', '-')}"
        rows[name] = over_seeds(
            [bench.run(bench.student_config(f"{place}-{s}", steps, s, distilled=True, **told)) for s in seeds]
        )
    tell(rows)
    return {"rows": rows}


def goose(bench: Bench) -> dict[str, Any]:
    best = bench.require_teacher()["cache"]
    steps, seeds = bench.scale.steps["goose"], bench.scale.seeds["goose"]
    rows = {}
    told: dict[str, dict[str, Any]] = {"CE": {"distilled": False}, "distilled": {"distilled": True, "temperature": 1.0}}
    for name, model in KINDS.items():
        for loss, how in told.items():
            place = f"goose-{name.replace(' ', '-')}-{loss}"
            runs = [bench.run(bench.student_config(f"{place}-{s}", steps, s, model=model, **how)) for s in seeds]
            rows[f"{name}, {loss}"] = over_seeds(runs)
    tell(rows)
    tax = {}
    for loss in ("CE", "distilled"):
        spiking, dense = (rows[f"{name}, {loss}"] for name in ("Goose", "dense twin"))
        ratios = [
            one["perplexity"] / other["perplexity"] for one, other in zip(spiking["runs"], dense["runs"], strict=True)
        ]
        tax[loss] = {"mean": sum(ratios) / len(ratios), "least": min(ratios), "most": max(ratios)}
        print(f"  ternary tax, {loss}: {tax[loss]['mean']:.3f} × the perplexity of the dense twin")
    return {"teacher_perplexity": best["best_perplexity"], "ternary_tax": tax, "rows": rows}


def scan(bench: Bench) -> dict[str, Any]:
    steps, seeds = bench.scale.steps["scan"], bench.scale.seeds["scan"]
    rows = {}
    for way in ("eps", "exact"):
        for decay in ("one decay", "log-spaced"):
            for name in ("spikes", "identity"):
                model = KINDS["Goose" if name == "spikes" else "dense twin"]
                runs = []
                for s in seeds:
                    config = bench.student_config(
                        f"scan-{way}-{decay.replace(' ', '-')}-{name}-{s}", steps, s, distilled=False, model=model
                    )
                    # The recurrence that was put back may do anything; all runs go on to their end.
                    config = replace(config, guard=replace(config.guard, on=False))
                    change = scalar_decay if decay == "one decay" else None
                    runs.append(bench.run(config, change, eps_scan_back() if way == "eps" else nullcontext()))
                rows[f"{way}, {decay}, {name}"] = over_seeds(runs)
    tell(rows)
    return {"rows": rows}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "teacher": teacher,
    "student": student,
    "temperature": temperature,
    "goose": goose,
    "scan": scan,
}


def tell(rows: dict[str, Any]) -> None:
    """A table: perplexity with its spread, seconds, T and health where there are any."""
    for name, row in rows.items():
        found = row["perplexity"]
        line = f"  {name:<28} perplexity {found['mean']:.3f} ({found['least']:.3f} to {found['most']:.3f})"
        line += f", {row['seconds']['mean']:.1f} s"
        if "temperature" in row:
            line += (
                f", T {row['temperature']['mean']:.3f}, by rates alone {row['temperature_schedule_only']['mean']:.3f}"
            )
        if "agreement" in row:
            line += f", agreement {row['agreement']['mean']:.3f}, correlation {row['correlation']['mean']:.3f}"
        if "spikes" in row:
            line += f", firing {row['spikes']['firing']:.1%}, dead {row['spikes']['dead']:.1%}"
        print(line, flush=True)


# ---- the figure --------------------------------------------------------------------------------------------------------------


def draw(results: dict[str, Any], path: Path) -> None:
    """Validation loss of students by steps and by seconds, and perplexities of Goose, its twin and the GPT."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    if "student" not in results or "goose" not in results:
        return
    colours = {"distilled": "#0b6fa4", "distilled, T = 1": "#4fa36c", "CE": "#9a9a9a", "CE, as long": "#d1812a"}
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    for axis, (unit, place) in zip(axes, (("steps", 0), ("seconds of training", 1)), strict=False):
        for name, row in results["student"]["rows"].items():
            for run in row["runs"]:
                label = name if run["seed"] == 0 else None
                axis.plot(
                    [point[place] for point in run["curve"]], [point[2] for point in run["curve"]],
                    color=colours[name], lw=1.4, alpha=0.9, label=label,
                )  # fmt: skip
        curve = results["teacher"]["curve"] if "teacher" in results else []
        if curve:
            axis.axhline(min(point[2] for point in curve), color="#444444", lw=1.0, ls="--", label="teacher")
        axis.set_xlabel(unit)
        axis.set_ylabel("validation loss, nats per byte")
        axis.set_title("a small GPT, every line a seed", fontsize=10, loc="left")
    axes[0].legend(frameon=False, fontsize=9)
    rows = results["goose"]["rows"]
    for side, loss in enumerate(("CE", "distilled")):
        for place, kind in enumerate(KINDS):
            row = rows[f"{kind}, {loss}"]
            at = place + 0.36 * (side - 0.5)
            axes[2].bar(
                at, row["perplexity"]["mean"], width=0.34, color=colours[loss], label=loss if not place else None
            )
            axes[2].plot([at] * len(row["runs"]), [run["perplexity"] for run in row["runs"]], "k.", ms=5)
    axes[2].axhline(results["goose"]["teacher_perplexity"], color="#444444", lw=1.0, ls="--", label="teacher")
    axes[2].set_xticks(range(len(KINDS)), list(KINDS))
    every = [run["perplexity"] for row in rows.values() for run in row["runs"]]
    lowest = min([results["goose"]["teacher_perplexity"], *every])
    axes[2].set_ylim(lowest - 0.25 * (max(every) - lowest), max(every) + 0.35 * (max(every) - lowest))
    axes[2].set_ylabel("perplexity per byte (axis does not begin at 0)")
    axes[2].set_title("equal shapes, dots are seeds", fontsize=10, loc="left")
    axes[2].legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(path)


def main() -> None:
    """Run the parts that are asked for, and merge what they found into the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="a part; may be given several times (default: all)"
    )
    parser.add_argument("--folder", type=Path, help="of the runs (default: runs/distill_evidence)")
    parser.add_argument("--seeds", type=int, help="how many of every part (default: 3 of student, 2 of the others)")
    parser.add_argument("--seed", type=int, help="this one alone; its runs are kept, and the JSON is not written")
    parser.add_argument("--tiny", action="store_true", help="everything in seconds on a CPU")
    arguments = parser.parse_args()
    small = arguments.tiny or not ON_GPU
    folder = arguments.folder or Path("runs", "distill_evidence_tiny" if small else "distill_evidence")
    scale = TINY if small else H200
    if arguments.seeds is not None:
        scale = replace(scale, seeds=dict.fromkeys(PARTS, range(arguments.seeds)))
    if arguments.seed is not None:
        scale = replace(scale, seeds=dict.fromkeys(PARTS, (arguments.seed,)))
    bench = Bench(folder, scale)
    file = "distill_evidence_cpu" if small else "distill_evidence"
    kept = folder / "results.json"
    before = RESULTS / f"{file}.json"
    results: dict[str, Any] = {}
    if kept.is_file():
        results = json.loads(kept.read_text())
    elif before.is_file() and not small:
        results = json.loads(before.read_text())["results"]  # parts that are not asked for stay
    for name in arguments.only or PARTS:
        print(f"{name}:", flush=True)
        started = time.perf_counter()
        found = PARTS[name](bench)
        if arguments.seed is not None:
            continue
        results[name] = found
        results[name]["part_seconds"] = time.perf_counter() - started
        print(f"  {results[name]['part_seconds']:.0f} s", flush=True)
        kept.write_text(json.dumps(results))
        path = write(file, results)
    if arguments.seed is not None:
        return
    print(path)
    draw(results, folder / "figure.png" if small else RESULTS.parent / "figures" / "distill_evidence.png")


if __name__ == "__main__":
    main()
