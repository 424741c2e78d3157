"""Correlated noise beside independent noise: time of the noise of a release, and the error of training sums at one ε.

Time: the same sums get the noise of one release, in one run. Error: root mean square of the noise in the sums of the first
1 … T releases, over the clip norm, with the least σ for ε by "rdp" at δ = 1e-6; it needs no device. `--quick` takes small
numbers and writes nothing.
"""

import argparse
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._timing import ratio, take_turns, write
from gramian.privacy.accounting.noise_search import find_noise_multiplier
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noise_strategy import NoiseStrategy, kind_of

CUDA = torch.cuda.is_available()
BANDS = (2, 4, 8, 16, 32)
KEY, DELTA = bytes(32), 1e-6
RUNS = {
    "2 epochs": (0.02, 100),
    "10 epochs": (0.02, 500),
    "100 epochs": (0.02, 5000),
    "20 epochs, small batches": (0.002, 10_000),
}
"""{name: (sample rate, releases)}."""
EPSILONS = (1.0, 8.0)
FIGURE = Path(__file__).parent / "figures" / "correlated_noise.png"


def times(quick: bool) -> dict[str, Any]:
    """Milliseconds of the noise of one release on two matrices, and ratios to independent noise."""
    width = 256 if quick else 8192 if CUDA else 512
    device = "cuda" if CUDA else "cpu"
    plan = NoisePlan(KEY, [("a", (width, width)), ("b", (width, width))])
    sums = [torch.zeros(width, width, device=device) for _ in range(2)]
    places = [plan.offsets["a"], plan.offsets["b"]]
    variants: dict[str, Any] = {"gaussian": partial(next_release, plan, sums, places, [0])}
    for name in ("bandmf", "bisr"):
        for bands in (2,) if quick else BANDS[::2]:
            noise = CorrelatedNoise(plan, NoiseStrategy.of(name, bands, 1000))  # type: ignore[arg-type]
            variants[f"{name}, {bands} bands"] = partial(next_release, noise, sums, places, [0])
    found = take_turns(variants, 3 if quick else 9, 2, max(BANDS))
    return {
        "elements": 2 * width * width,
        "milliseconds": {name: 1e3 * statistics.median(t) for name, t in found.items()},
        "over gaussian": {name: ratio(t, found["gaussian"]) for name, t in found.items()},
    }


def next_release(noise: Any, sums: list[torch.Tensor], places: list[int], number: list[int]) -> None:
    """Add the noise of the next release to the sums."""
    noise.add_noise_to(sums, sums, places, 1.0, number[0], 1.0)
    number[0] += 1


def errors(quick: bool) -> dict[str, Any]:
    """{run: {ε: {noise: {bands: error over that of independent noise at the same ε}}}}, and σ."""
    found: dict[str, Any] = {}
    for name, (rate, releases) in list(RUNS.items())[: 1 if quick else None]:
        for epsilon in EPSILONS:
            plain = find_noise_multiplier(epsilon, DELTA, rate, releases, "rdp")
            base, of_run = plain * math.sqrt((releases + 1) / 2), {}
            for kind in ("bandmf", "bisr"):
                for bands in BANDS[:2] if quick else (*BANDS, 64):
                    if kind == "bandmf" and (bands > 1 / rate or bands > releases):
                        continue
                    tail = kind_of(kind, bands, rate)  # type: ignore[arg-type]
                    sigma = find_noise_multiplier(epsilon, DELTA, rate, releases, "rdp", tail)
                    error = sigma * NoiseStrategy.of(kind, bands, releases).error(releases)  # type: ignore[arg-type]
                    of_run.setdefault(kind, {})[str(bands)] = error / base
            found.setdefault(name, {})[str(epsilon)] = of_run
            print(name, epsilon, of_run, flush=True)
    return found


def draw(found: dict[str, Any]) -> None:
    """Error over that of independent noise, by bands, a panel for each run."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3), sharey=True, layout="constrained")
    for panel, (name, of_run) in zip(panels, found.items(), strict=True):
        for epsilon, kinds in of_run.items():
            for kind, values in kinds.items():
                style = "-" if epsilon == str(EPSILONS[-1]) else "--"
                colour = "tab:blue" if kind == "bandmf" else "tab:orange"
                panel.plot([int(b) for b in values], list(values.values()), style, color=colour, marker=".",
                           label=f"{kind}, ε = {float(epsilon):g}")  # fmt: skip
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"{name} (q = {RUNS[name][0]})", xscale="log", yscale="log", xlabel="bands")
        panel.set_xticks([*BANDS, 64], labels=[str(bands) for bands in (*BANDS, 64)], minor=False)
        panel.set_xticks([], minor=True)
    panels[0].set_ylabel("noise in the sums, over independent")
    panels[0].legend(fontsize=7)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    """Measure, and unless `--quick` write the JSON and the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    results = {"time": times(quick), "error": errors(quick)}
    print(results["time"])
    if not quick:
        draw(results["error"])
        print(write("correlated_noise" if CUDA else "correlated_noise_cpu", results))


if __name__ == "__main__":
    main()
