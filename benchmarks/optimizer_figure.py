"""Curves of `optimizer_race`: held-out loss over steps, the best trial of each optimizer, mean and range of its seeds.

Reads benchmarks/results/optimizer_race.json and writes benchmarks/figures/optimizer_race.png. Diamonds are ends of shorter runs
of KFAC, each with a schedule of its own length.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.optimizer_race import known_rows
from benchmarks.optimizer_tables import NAMES, runs_of

FIGURE = Path(__file__).parent / "figures" / "optimizer_race.png"
TITLES = {
    "bytes": "GPT 6 × 384, bytes (nats per byte)",
    "bpe": "GPT 8 × 512, BPE of 8,192 (nats per token)",
    "autoencoder": "MNIST autoencoder (cross entropy per image)",
    "cnn": "MNIST CNN (cross entropy)",
}
COLOURS = {
    "kfac": "#c1272d",
    "muon": "#0000a7",
    "adamw": "#008176",
    "soap": "#eecc16",
    "soap-1024": "#eecc16",
    "shampoo": "#8a4f9e",
    "sgd": "#888888",
}


def main() -> None:
    """Draw the four problems."""
    rows = known_rows("optimizer_race")
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    for axis, (problem, title) in zip(axes.flat, TITLES.items(), strict=True):
        ends, early = [], float("inf")
        for name, colour in COLOURS.items():
            runs = runs_of(rows, problem, name)
            if not runs:
                continue
            steps = sorted(int(step) for step in set.intersection(*(set(run["curve"]) for run in runs)))
            losses = [[run["curve"][str(step)] for run in runs] for step in steps]
            mean = [sum(one) / len(one) for one in losses]
            label = f"{NAMES[name]}: {mean[-1]:.4g}, {len(runs)} of 3 seeds"
            axis.plot(steps, mean, color=colour, label=label, linewidth=1.6)
            axis.fill_between(
                steps, [min(o) for o in losses], [max(o) for o in losses], color=colour, alpha=0.2, linewidth=0
            )
            ends.append(mean[-1])
            early = min(early, mean[next(place for place, step in enumerate(steps) if step >= 0.15 * steps[-1])])
        shorter = [row for row in rows if row["problem"] == problem and row["optimizer"] == "kfac"]
        full = max(row["steps"] for row in shorter)
        short = [row for row in shorter if row["steps"] < full]
        axis.plot([r["steps"] for r in short], [r["loss"] for r in short], "D", color=COLOURS["kfac"], markersize=4)
        low, high = min(ends), max(early, 1.1 * sorted(ends)[min(3, len(ends) - 1)])
        axis.set_yscale("log")
        axis.set_ylim(low * 0.97, 1.3 * high)
        axis.set(title=title, xlabel="steps")
        axis.yaxis.set_minor_formatter(plt.ScalarFormatter())
        axis.yaxis.set_major_formatter(plt.ScalarFormatter())
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)
    print(FIGURE)


if __name__ == "__main__":
    main()
