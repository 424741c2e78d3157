"""The cost of every capability on this code and on another checkout of it, in turns.

Each turn is a process of its own on one of the two; blocks of steps alternate with blocks of a baseline that uses nothing of
the library, and their time stands over the baseline's, so that drift drops out. Against a plain step: idle taps, per-sample
norms with and without their audit, a K-FAC refresh, the private step; "plain" shows what is noise. Against eager torch: the
distillation loss. Against a hand-written loop: `gramian train`. The first step, with compilation and proof, stands beside.

    python -m benchmarks.against ../before --rounds 3
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gramian
from benchmarks import distill_loss, train_step
from benchmarks._timing import seconds, write
from benchmarks.private_step import loss_of, ours
from gramian.models.gpt import GPT, GPTConfig
from gramian.taps import hub_of

HERE = Path(__file__).parent.parent
WORKLOADS = (
    "idle taps", "plain", "norms", "norms without audit", "kfac refresh", "private", "distillation loss", "training loop",
)  # fmt: skip
PAIRS = 7
"""Blocks of a workload and of its baseline that take turns in one process."""


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


def capture_steps(model: GPT, x: torch.Tensor, proof: str = "auto") -> dict[str, Callable[[], Any]]:
    """One training step without an update, plain and under each capture."""
    kfac = gramian.KFACNaturalGradient(damping=1e-3, update_freq=1, kfac_big_threshold=4096)

    def plain() -> None:
        model.zero_grad()
        loss_of(model, x).backward()

    def norms(audit: bool) -> None:
        with gramian.per_sample_norms(model, audit=audit, proof=proof):
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


def compare(step: Callable[[], Any], baseline: Callable[[], Any], steps: int) -> dict[str, float]:
    """Times of a step over those of the baseline, blocks of both in turns: median of the ratio, ratio of the least, first."""
    first = seconds(step, 1)
    step()
    baseline()
    pairs = [(seconds(baseline, steps), seconds(step, steps)) for _ in range(PAIRS)]
    return {
        "ratio": statistics.median(mine / base for base, mine in pairs),
        "least": min(mine for _, mine in pairs) / min(base for base, _ in pairs),
        "first": first / statistics.median(base for base, _ in pairs),
    }


def turn(length: int, only: list[str], proof: str) -> dict[str, dict[str, float]]:
    """Every workload of this process, or some of them, each beside a baseline that uses nothing of the library."""
    model, x = model_and_batch(length)
    untouched = copy.deepcopy(model)  # never captured
    plain = capture_steps(untouched, x)["plain"]
    idle = copy.deepcopy(model)
    hub_of(idle).install()
    steps = {"idle taps": capture_steps(idle, x)["plain"], **capture_steps(model, x, proof)}
    found = {name: compare(step, plain, 3) for name, step in steps.items() if name in only}
    if "private" in only:
        private, engine, _ = ours(model, x, proof=proof)
        found["private"] = compare(private, plain, 3)
        engine.detach()
    if "distillation loss" in only:
        rows = distill_loss.inputs(distill_loss.SHAPES[0])
        found["distillation loss"] = compare(distill_loss.ours(rows), distill_loss.eager(rows), 3)
    if "training loop" in only:
        found["training loop"] = training_loop()
    return found


def training_loop() -> dict[str, float]:
    """A block of steps of `gramian train` beside a block of a hand-written loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world, batch = train_step.world_of(device), train_step.BATCHES[device][-1]
    with tempfile.TemporaryDirectory() as folder:
        steps = train_step.BLOCK * (train_step.WARM_UP + PAIRS + 3)
        config = train_step.config_of(device, batch, str(Path(folder, "run")), steps)
        run = train_step.InBlocks(config, world)
        by_hand, _, batches = train_step.hand_written(config, world.device)
        try:
            for _ in range(train_step.WARM_UP):
                run()
            return compare(run, by_hand, 1)
        finally:
            run.finish()
            batches.close()


def main() -> None:
    """Take turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--proof", default="auto", help='"off": the first step is that of a model that is not proven')
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(options.turn, options.only, options.proof)))
        return
    results: dict[str, Any] = {}
    for length in options.lengths:
        runs: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
        for _ in range(options.rounds):
            for name, folder in (("this", HERE), ("other", options.other.resolve())):
                path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
                command = [sys.executable, str(HERE / "benchmarks" / "against.py"), ".", "--turn", str(length)]
                command += ["--proof", options.proof, "--only", *options.only]
                environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
                ran = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True)
                runs[name].append(json.loads(ran.stdout.splitlines()[-1]))
        results[str(length)] = table(runs)
        print(json.dumps(results[str(length)], indent=2))
    print(write("against" if torch.cuda.is_available() else "against_cpu", results))


def table(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over turns of the ratio to the baseline, on both, and their quotient; that of the least times, too.

    Norms, the refresh and the private step wait for Python, whose speed differs by a fifth from process to process.
    """
    found: dict[str, Any] = {}
    for workload in runs["this"][0]:
        ratios = {side: [run[workload]["ratio"] for run in several] for side, several in runs.items()}
        least = {side: min(run[workload]["least"] for run in several) for side, several in runs.items()}
        this, other = (statistics.median(ratios[side]) for side in ("this", "other"))
        found[workload] = {
            "over baseline": this,
            "over baseline before": other,
            "now over before": this / other,
            "least, now over before": least["this"] / least["other"],
            "turns": ratios,
            "first step over baseline": statistics.median(run[workload]["first"] for run in runs["this"]),
        }
    return found


if __name__ == "__main__":
    main()
