"""What captures and the private step cost on this code and on another checkout of it, in turns.

Each turn is a process of its own on one of the two; steps alternate with plain ones of an untouched copy of the model, and
their time stands over those, so that drift drops out. Workloads: per-sample norms with and without their audit,
a K-FAC refresh, the private step; "plain" shows what is noise. The proof's own time, which is spent once, stands beside.

    python -m benchmarks.against ../before --rounds 3
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._timing import seconds, synchronize, write
from benchmarks.private_step import loss_of, ours
from gramian.models.gpt import GPT, GPTConfig

HERE = Path(__file__).parent.parent


def model_and_batch(length: int) -> tuple[GPT, torch.Tensor]:
    """A GPT of 210 M parameters in bfloat16 on a GPU, a small one elsewhere, and tokens for it."""
    cuda = torch.cuda.is_available()
    sizes = (
        {"vocabulary": 32000, "layers": 12, "width": 1024, "heads": 16}
        if cuda
        else {"vocabulary": 64, "layers": 1, "width": 32, "heads": 2}
    )
    model = GPT(GPTConfig(context=length, **sizes))
    model = model.to("cuda", torch.bfloat16) if cuda else model
    tokens = 16384 if cuda else 256
    return model, torch.randint(model.config.vocabulary, (tokens // length, length), device=model.head.weight.device)


def workloads(model: GPT, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """One step of each, but for the private one."""
    import gramian

    kfac = gramian.KFACNaturalGradient(damping=1e-3, update_freq=1, kfac_big_threshold=4096)

    def plain() -> None:
        model.zero_grad()
        loss_of(model, x).backward()

    def norms(audit: bool) -> None:
        with gramian.per_sample_norms(model, audit=audit):
            plain()

    def refresh() -> None:
        with kfac.capture(model, num_terms=x.numel()):
            plain()

    return {
        "plain": plain,
        "norms": lambda: norms(True),
        "norms without audit": lambda: norms(False),
        "kfac refresh": refresh,
    }


def turn(length: int) -> dict[str, dict[str, float]]:
    """Of every workload in this process: its time over that of plain steps between its own, and of its first step."""
    model, x = model_and_batch(length)
    twin = copy.deepcopy(model)  # never captured
    plain, steps = workloads(twin, x)["plain"], workloads(model, x)
    plain()
    found: dict[str, dict[str, float]] = {"ratio": {}, "first": {}}
    for name in (*steps, "private"):
        if name == "private":  # last: from now on the model is private
            steps[name], engine, _ = ours(model, x)
        synchronize()
        begun = time.perf_counter()
        steps[name]()
        synchronize()
        first = time.perf_counter() - begun
        steps[name]()
        pairs = [(seconds(plain, 3), seconds(steps[name], 3)) for _ in range(7)]
        found["ratio"][name] = statistics.median(mine / its for its, mine in pairs)
        found["first"][name] = first / statistics.median(its for its, _ in pairs)
    engine.detach()
    return found


def main() -> None:
    """Take turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(options.turn)))
        return
    results: dict[str, Any] = {}
    for length in options.lengths:
        runs: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
        for _ in range(options.rounds):
            for name, folder in (("this", HERE), ("other", options.other.resolve())):
                path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
                command = [sys.executable, str(HERE / "benchmarks" / "against.py"), ".", "--turn", str(length)]
                ran = subprocess.run(
                    command, env=os.environ | {"PYTHONPATH": path}, cwd=folder, stdout=subprocess.PIPE, check=True
                )
                runs[name].append(json.loads(ran.stdout.splitlines()[-1]))
        results[str(length)] = table(runs)
        print(json.dumps(results[str(length)], indent=2))
    print(write("against" if torch.cuda.is_available() else "against_cpu", results))


def table(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over turns of the ratio to the plain step, on both, and their quotient; that of the fastest turns, too.

    Norms and the private step wait for Python, whose speed differs from process to process: a slow turn says little.
    """
    found: dict[str, Any] = {}
    for workload in runs["this"][0]["ratio"]:
        ratios = {side: [run["ratio"][workload] for run in several] for side, several in runs.items()}
        this, other = (statistics.median(ratios[side]) for side in ("this", "other"))
        found[workload] = {
            "over plain": this,
            "over plain before": other,
            "now over before": this / other,
            "fastest turn, now over before": min(ratios["this"]) / min(ratios["other"]),
            "turns": ratios,
            "first step over plain": statistics.median(run["first"][workload] for run in runs["this"]),
        }
    return found


if __name__ == "__main__":
    main()
