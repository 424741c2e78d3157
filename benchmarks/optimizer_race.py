"""`gramian.optim.KFAC` beside tuned AdamW, Muon, SOAP, Shampoo and SGD: steps and seconds to a loss, in one harness.

The problems are those of `optimizer_problems`; float32 weights, bf16 autocast, linear warm-up and a cosine to zero that ends at
the run's own last step. On "bytes", where KFAC's recipe was searched, all are tuned over learning rate, second moment (or
momentum), warm-up and weight decay. On the other problems KFAC runs with its defaults, untuned, and all others are tuned again.
Then the best of each runs on three seeds, and KFAC and Muon with fewer steps: how many they need for AdamW's loss. Seconds are
of training alone, after untimed steps that compile the model, which is compiled for every optimizer. Needs a GPU; SOAP and
Shampoo need the package pytorch_optimizer; "soap-1024" is SOAP that leaves sides of more than 1,024 alone.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gramian
from benchmarks._timing import RESULTS, write
from benchmarks.optimizer_problems import Problem, load


@dataclass(frozen=True)
class Trial:
    """One run: an optimizer with its settings."""

    optimizer: str
    lr: float
    beta: float
    """β₂ of AdamW and SOAP; momentum of Muon, KFAC, Shampoo and SGD."""
    rest: float = 0.0
    """Learning rate of embeddings, head and vectors where the optimizer is for matrices; KFAC has its own rule."""
    steps: int = 0
    """0: as many as the problem's tuning runs have."""
    warmup: int = 40
    decay: float = 0.1
    """Weight decay of matrices; vectors have none."""
    seed: int = 0
    compiled: bool = True
    problem: str = ""


KFAC = Trial("kfac", 2.8e-3, 0.9)
"""The defaults."""
GRIDS: dict[str, dict[str, list[Trial]]] = {
    "bytes": {
        "kfac": [
            *(Trial("kfac", lr, 0.9) for lr in (1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3)),
            *(Trial("kfac", lr, 0.95) for lr in (1.4e-3, 2e-3, 2.8e-3)),
            Trial("kfac", 2.8e-3, 0.85),
            *(Trial("kfac", 2.8e-3, 0.9, warmup=warmup) for warmup in (20, 80, 160)),
            *(Trial("kfac", 2.8e-3, 0.9, decay=decay) for decay in (0.03, 0.3)),
        ],
        "adamw": [
            *(Trial("adamw", lr, beta) for beta in (0.95, 0.99) for lr in (7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3)),
            *(Trial("adamw", lr, 0.9) for lr in (1.4e-3, 2e-3, 2.8e-3)),
            *(Trial("adamw", 2e-3, 0.95, warmup=warmup) for warmup in (20, 80, 160, 320)),
            *(Trial("adamw", lr, 0.95, warmup=warmup) for lr in (2.8e-3, 4e-3) for warmup in (160, 320)),
            *(Trial("adamw", lr, 0.99, warmup=160) for lr in (2e-3, 2.8e-3)),
            *(Trial("adamw", lr, 0.95, warmup=480) for lr in (2e-3, 2.8e-3, 4e-3, 5.6e-3)),
            *(Trial("adamw", lr, 0.95, warmup=640) for lr in (2.8e-3, 4e-3)),
            *(Trial("adamw", 4e-3, beta, warmup=480) for beta in (0.9, 0.99)),
            *(Trial("adamw", 4e-3, 0.95, warmup=480, decay=decay) for decay in (0.03, 0.3)),
            *(Trial("adamw", lr, 0.99, warmup=320) for lr in (2.8e-3, 4e-3)),
        ],
        "muon": [
            *(Trial("muon", lr, 0.95, rest) for lr in (4e-3, 8e-3, 1.6e-2) for rest in (1e-3, 2e-3)),
            *(Trial("muon", lr, 0.9, 2e-3) for lr in (4e-3, 8e-3, 1.6e-2)),
            *(Trial("muon", 8e-3, beta, 4e-3) for beta in (0.85, 0.9)),
            Trial("muon", 8e-3, 0.85, 2e-3),
            *(Trial("muon", 8e-3, 0.9, 2e-3, warmup=warmup) for warmup in (20, 80, 160, 320)),
            *(Trial("muon", 8e-3, 0.9, 2e-3, warmup=80, decay=decay) for decay in (0.03, 0.3)),
        ],
        "soap": [
            *(Trial("soap", lr, 0.95) for lr in (1e-3, 2e-3, 4e-3, 8e-3)),
            *(Trial("soap", 4e-3, beta) for beta in (0.9, 0.98)),
            *(Trial("soap", 4e-3, 0.95, warmup=warmup) for warmup in (20, 80, 160, 320, 480, 640)),
            Trial("soap", 8e-3, 0.95, warmup=480),
            *(Trial("soap", 4e-3, 0.95, warmup=320, decay=decay) for decay in (0.03, 0.3)),
        ],
        "shampoo": [
            *(Trial("shampoo", lr, 0.9) for lr in (1e-4, 3e-4, 1e-3, 3e-3)),
            *(Trial("shampoo", 1e-3, beta) for beta in (0.8, 0.95)),
            *(Trial("shampoo", lr, 0.9, warmup=160) for lr in (1e-3, 2e-3)),
            *(Trial("shampoo", 2e-3, 0.9, warmup=warmup) for warmup in (320, 480)),
            Trial("shampoo", 3e-3, 0.9, warmup=320),
            *(Trial("shampoo", 2e-3, 0.9, warmup=320, decay=decay) for decay in (0.03, 0.3)),
        ],
        "sgd": [
            *(Trial("sgd", lr, 0.9) for lr in (0.1, 0.3, 1.0, 3.0)),
            *(Trial("sgd", lr, 0.98) for lr in (0.03, 0.1, 0.3, 1.0)),
            *(Trial("sgd", lr, 0.99) for lr in (0.01, 0.03)),
            *(Trial("sgd", 0.03, 0.98, warmup=warmup) for warmup in (20, 160)),
            Trial("sgd", 0.01, 0.98),
            Trial("sgd", 0.003, 0.99),
            Trial("sgd", 0.01, 0.995),
            *(Trial("sgd", 0.01, 0.99, decay=decay) for decay in (0.01, 0.03)),
            Trial("sgd", 0.01, 0.99, warmup=320),
        ],
    },
    "bpe": {
        "kfac": [KFAC],
        "adamw": [
            *(Trial("adamw", lr, 0.99, warmup=warmup) for warmup in (730, 1000) for lr in (2e-3, 2.8e-3, 4e-3)),
            *(Trial("adamw", 2.8e-3, 0.99, warmup=warmup) for warmup in (500, 1200)),
            *(Trial("adamw", 2.8e-3, beta, warmup=1000) for beta in (0.95, 0.999, 0.9995)),
            *(Trial("adamw", lr, 0.999, warmup=1000) for lr in (2e-3, 4e-3)),
            Trial("adamw", 2.8e-3, 0.999, warmup=730),
            Trial("adamw", 2.8e-3, 0.9998, warmup=1000),
            *(Trial("adamw", 2.8e-3, 0.9995, warmup=1000, decay=decay) for decay in (0.03, 0.3)),
        ],
        "muon": [
            *(Trial("muon", lr, 0.8, 4e-3) for lr in (4e-3, 5.6e-3, 8e-3, 1.1e-2)),
            *(Trial("muon", lr, 0.85, 4e-3) for lr in (5.6e-3, 8e-3)),
            *(Trial("muon", 5.6e-3, 0.8, rest) for rest in (2e-3, 8e-3)),
            Trial("muon", 5.6e-3, 0.7, 4e-3),
            Trial("muon", 5.6e-3, 0.8, 4e-3, warmup=160),
            Trial("muon", 5.6e-3, 0.8, 1.6e-2),
            Trial("muon", 5.6e-3, 0.8, 8e-3, warmup=160),
            *(Trial("muon", 5.6e-3, 0.8, rest) for rest in (3.2e-2, 6.4e-2)),
            *(Trial("muon", 5.6e-3, 0.8, 3.2e-2, decay=decay) for decay in (0.03, 0.3)),
            Trial("muon", 5.6e-3, 0.8, 3.2e-2, warmup=160),
        ],
        "soap-1024": [
            *(Trial("soap-1024", 4e-3, beta, warmup=160) for beta in (0.9, 0.95, 0.98)),
            *(Trial("soap-1024", lr, 0.95, warmup=160) for lr in (2e-3, 8e-3)),
            *(Trial("soap-1024", lr, 0.95, warmup=500) for lr in (2e-3, 4e-3)),
            *(Trial("soap-1024", lr, 0.95) for lr in (1e-3, 4e-3)),
            Trial("soap-1024", 4e-3, 0.95, warmup=1000),
            *(Trial("soap-1024", 4e-3, 0.95, warmup=500, decay=decay) for decay in (0.03, 0.3)),
        ],
        "shampoo": [
            *(Trial("shampoo", lr, 0.9) for lr in (3e-4, 1e-3, 3e-3)),
            *(Trial("shampoo", 1e-3, beta) for beta in (0.8, 0.95)),
            *(Trial("shampoo", lr, 0.9, warmup=500) for lr in (3e-4, 1e-3, 2e-3, 3e-3)),
            Trial("shampoo", 2e-3, 0.9, warmup=1000),
            *(Trial("shampoo", 2e-3, 0.9, warmup=500, decay=decay) for decay in (0.03, 0.3)),
        ],
        "sgd": [
            *(Trial("sgd", lr, beta) for beta in (0.98, 0.99) for lr in (0.01, 0.03, 0.1)),
            Trial("sgd", 0.3, 0.98),
            Trial("sgd", 0.03, 0.995),
            *(Trial("sgd", lr, beta) for beta in (0.9, 0.95) for lr in (0.03, 0.1)),
            *(Trial("sgd", lr, 0.98, warmup=500) for lr in (0.03, 0.1)),
            *(Trial("sgd", 0.03, 0.98, warmup=500, decay=decay) for decay in (0.01, 0.03)),
        ],
    },
}
IMAGES: dict[str, list[Trial]] = {
    "kfac": [KFAC],
    "adamw": [
        *(Trial("adamw", lr, beta) for beta in (0.95, 0.99) for lr in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
        *(Trial("adamw", lr, 0.95, warmup=warmup) for warmup in (160, 400) for lr in (2.5e-4, 5e-4, 1e-3)),
        *(Trial("adamw", lr, beta, warmup=400) for lr in (1e-3, 1.4e-3, 2e-3) for beta in (0.9, 0.99)),
        *(Trial("adamw", lr, 0.95, warmup=warmup) for lr, warmup in ((1.4e-3, 400), (1e-3, 600))),
        *(Trial("adamw", lr, beta) for lr, beta in ((1.6e-2, 0.99), (1.6e-2, 0.95), (8e-3, 0.999))),
        *(
            Trial("adamw", lr, 0.9, warmup=warmup)
            for lr, warmup in ((2.8e-3, 400), (2e-3, 600), (2.8e-3, 600), (4e-3, 400))
        ),
        Trial("adamw", 2.8e-3, 0.8, warmup=400),
        *(Trial("adamw", lr, 0.9, warmup=600) for lr in (4e-3, 5.6e-3)),
    ],
    "muon": [
        *(Trial("muon", lr, b, rest) for b in (0.9, 0.95) for lr in (4e-3, 8e-3, 1.6e-2) for rest in (1e-3, 4e-3)),
        *(Trial("muon", lr, 0.9, 8e-3) for lr in (1.6e-2, 3.2e-2)),
        *(Trial("muon", 2e-3, 0.95, rest) for rest in (4e-3, 8e-3)),
        *(Trial("muon", lr, 0.9, 4e-3) for lr in (3.2e-2, 6.4e-2, 0.128)),
    ],
    "soap": [
        *(Trial("soap", lr, beta) for beta in (0.95, 0.99) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)),
        *(Trial("soap", 8e-3, beta) for beta in (0.7, 0.8, 0.9)),
    ],
    "shampoo": [Trial("shampoo", lr, beta) for beta in (0.9, 0.95) for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)],
    "sgd": [
        *(Trial("sgd", lr, beta) for beta in (0.9, 0.98) for lr in (0.01, 0.03, 0.1, 0.3, 1.0)),
        *(Trial("sgd", lr, 0.99) for lr in (0.3, 1.0)),
        Trial("sgd", 0.3, 0.995),
        *(Trial("sgd", lr, 0.8) for lr in (0.03, 0.1)),
    ],
}
AROUND: dict[str, list[Trial]] = {
    "autoencoder": [
        Trial("adamw", 4e-3, 0.8, warmup=600),
        Trial("adamw", 4e-3, 0.9, warmup=800),
        *(Trial("adamw", 4e-3, 0.9, warmup=600, decay=decay) for decay in (0.01, 0.03, 0.3)),
        Trial("muon", 4e-3, 0.98, 4e-3),
        *(Trial("muon", 4e-3, 0.95, 4e-3, warmup=warmup) for warmup in (160, 400)),
        *(Trial("muon", 4e-3, 0.95, 4e-3, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("soap", 8e-3, 0.9, warmup=warmup) for warmup in (160, 400)),
        *(Trial("soap", 8e-3, 0.9, decay=decay) for decay in (0.03, 0.3)),
        Trial("shampoo", 3e-4, 0.8),
        *(Trial("shampoo", lr, 0.9, warmup=warmup) for warmup in (160, 400, 600) for lr in (1e-3, 3e-3)),
        *(Trial("shampoo", 1e-3, 0.9, warmup=400, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("sgd", lr, 0.9, warmup=warmup) for lr, warmup in ((0.03, 400), (0.1, 400), (1.0, 400))),
        *(Trial("sgd", 0.03, 0.9, decay=decay) for decay in (0.001, 0.01)),
    ],
    "cnn": [
        Trial("adamw", 8e-3, 0.99, warmup=160),
        *(Trial("adamw", 8e-3, 0.99, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("muon", 6.4e-2, beta, 4e-3) for beta in (0.8, 0.85)),
        Trial("muon", 6.4e-2, 0.9, 4e-3, warmup=160),
        *(Trial("muon", 6.4e-2, 0.9, 4e-3, decay=decay) for decay in (0.03, 0.3)),
        Trial("soap", 8e-3, 0.999),
        Trial("soap", 8e-3, 0.99, warmup=160),
        *(Trial("soap", 8e-3, 0.99, decay=decay) for decay in (0.03, 0.3)),
        Trial("shampoo", 1e-2, 0.8),
        Trial("shampoo", 1e-2, 0.9, warmup=160),
        *(Trial("shampoo", 1e-2, 0.9, decay=decay) for decay in (0.03, 0.3)),
        Trial("sgd", 0.3, 0.99, warmup=160),
        *(Trial("sgd", 0.3, 0.99, decay=decay) for decay in (0.001, 0.01, 0.03)),
        *(Trial("sgd", lr, 0.9, decay=0.001) for lr in (0.1, 0.3, 1.0)),
    ],
}
"""Trials around the best of `IMAGES`, which are of one problem."""
for _problem, _around in AROUND.items():
    GRIDS[_problem] = {name: grid + [one for one in _around if one.optimizer == name] for name, grid in IMAGES.items()}


@dataclass
class Stepping:
    """Optimizers of one model, the context of its backward, and the parameters whose gradients are clipped."""

    optimizers: list[Any]
    capture: Callable[[], Any]
    clipped: list[nn.Parameter]


def stepping(problem: Problem, model: nn.Module, trial: Trial) -> Stepping:
    """Build the optimizers of a trial, fused where torch has that."""
    hidden = problem.hidden(model)
    if trial.optimizer == "muon":
        hidden = [p for p in hidden if p.dim() == 2]  # torch's Muon takes no others
    mine = {id(p) for p in hidden} if trial.optimizer in ("muon", "kfac") else set()
    rest = [p for p in model.parameters() if id(p) not in mine]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        wide, narrow = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
        return [{"params": wide, "weight_decay": trial.decay}, {"params": narrow, "weight_decay": 0.0}]

    nothing = contextlib.nullcontext
    if trial.optimizer == "kfac":
        own = gramian.optim.KFAC(model, lr=trial.lr, momentum=trial.beta, weight_decay=trial.decay)
        return Stepping([own], lambda: own.capture(num_terms=problem.terms, head=problem.head), rest)
    if trial.optimizer == "sgd":
        sgd = torch.optim.SGD(groups(rest), lr=trial.lr, momentum=trial.beta, nesterov=True, fused=True)
        return Stepping([sgd], nothing, rest)
    if trial.optimizer in ("soap", "soap-1024", "shampoo"):
        import pytorch_optimizer
        from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

        if trial.optimizer != "shampoo":
            soap = pytorch_optimizer.SOAP(
                groups(rest),
                lr=trial.lr,
                betas=(0.95, trial.beta),
                precondition_frequency=10,
                max_precondition_dim=10_000 if trial.optimizer == "soap" else 1024,
            )
            return Stepping([soap], nothing, rest)
        shampoo = pytorch_optimizer.ScalableShampoo(
            groups(rest),
            lr=trial.lr,
            betas=(trial.beta, 0.99),
            preconditioning_compute_steps=50 if problem.name == "bpe" else 10,  # its roots are found one by one
            graft_type=LayerWiseGrafting.RMSPROP,
            moving_average_for_momentum=True,
            decoupled_weight_decay=True,
        )
        return Stepping([shampoo], nothing, rest)
    rate = trial.lr if trial.optimizer == "adamw" else trial.rest
    beta = trial.beta if trial.optimizer == "adamw" else 0.95
    adamw = torch.optim.AdamW(groups(rest), lr=rate, betas=(0.9, beta), fused=True)
    if trial.optimizer == "adamw":
        return Stepping([adamw], nothing, rest)
    muon = torch.optim.Muon(
        hidden, lr=trial.lr, momentum=trial.beta, weight_decay=trial.decay, adjust_lr_fn="match_rms_adamw"
    )
    return Stepping([muon, adamw], nothing, rest)


def train(problem: Problem, trial: Trial) -> dict[str, Any]:
    """Train one model; returns the trial with its held-out losses and the seconds of training without evaluations."""
    trial = replace(trial, steps=trial.steps or problem.steps, problem=problem.name)
    torch.manual_seed(trial.seed)
    model = problem.model()
    if trial.compiled:
        model.compile()
    run, source = stepping(problem, model, trial), problem.batches(1 + trial.seed)
    first = [[group["lr"] for group in optimizer.param_groups] for optimizer in run.optimizers]
    curve: dict[int, float] = {}
    aside, begun = 0.0, _now()
    for step in range(trial.steps):
        part = max(0, step - trial.warmup) / max(1, trial.steps - trial.warmup)
        factor = min((step + 1) / trial.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * part))
        for optimizer, rates in zip(run.optimizers, first, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        with run.capture():
            problem.loss(model, next(source)).backward()
        nn.utils.clip_grad_norm_(run.clipped, 1.0)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == trial.steps:
            before = _now()
            curve[step + 1] = problem.held_out(model)
            aside += _now() - before
    return {**asdict(trial), "loss": curve[trial.steps], "curve": curve, "seconds": _now() - begun - aside}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Tune the optimizers that are named, and run the best of each on more seeds and with fewer steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", default="bytes", choices=list(GRIDS))
    parser.add_argument("--data", type=Path, help="the problem's file or folder")
    parser.add_argument("--tune", nargs="*", default=[], help="optimizers to tune")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the trials of an optimizer only I, I + N, …")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds of the best trial of each tuned optimizer")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--of", nargs="*", help="optimizers whose best trial runs on more seeds (default: all)")
    parser.add_argument("--shorter", nargs="*", default=[], metavar="NAME:STEPS", help="also the best with fewer steps")
    parser.add_argument(
        "--beside", metavar="NAME", help="other runs share the GPU: write to results/NAME.json, no seconds"
    )
    parser.add_argument(
        "--merge", nargs="*", default=[], metavar="NAME", help="first take over the rows of results/NAME.json"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further run begins")
    options, begun = parser.parse_args(), time.perf_counter()
    problem, grid = load(options.problem, options.data), GRIDS[options.problem]
    rows = _known("optimizer_race")
    known = {_key(row) for row in rows}
    rows += [row for name in options.merge for row in _known(name) if _key(row) not in known]
    begin, name_of = len(rows), options.beside or "optimizer_race"
    done = {_key(row) for row in rows}
    compiled: set[str] = set()

    def go(trial: Trial, tuning: bool = False) -> None:
        trial = replace(trial, steps=trial.steps or problem.steps, problem=problem.name)
        same = {_key(asdict(trial)), *([_key(asdict(replace(trial, compiled=False)))] if tuning else [])}
        untimed = [row for row in rows if row["seconds"] is None and _key(row) in same]
        again = bool(untimed) and not (tuning or options.beside)  # where seconds count, a row without them runs again
        if (same & done and not again) or time.perf_counter() - begun > options.limit:
            return
        if trial.optimizer not in compiled and not options.beside:  # what is timed later
            train(problem, replace(trial, steps=45))
            compiled.add(trial.optimizer)
        if again:
            rows[:] = [row for row in rows if row not in untimed]
        rows.append(train(problem, trial) | ({"seconds": None} if options.beside else {}))
        done.add(_key(rows[-1]))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}), flush=True)
        write(name_of, rows[begin:] if options.beside else rows)

    part, parts = map(int, options.part.split("/"))
    for name in options.tune:
        for trial in grid[name][part::parts]:
            go(trial, tuning=True)
    best = {name: found for name in grid if (found := _best(rows, problem, name))}
    for seed in range(options.first_seed, options.seeds):
        for name in best if options.of is None else options.of:
            go(replace(best[name], seed=seed))
    for name, _, steps in (one.partition(":") for one in options.shorter):
        for seed in range(options.first_seed, max(1, options.seeds)):
            go(replace(best[name], steps=int(steps), seed=seed))
    for name, trial in best.items():
        same = [row for row in rows if _key({**row, "seed": 0}) == _key(asdict(trial))]
        losses = [round(row["loss"], 4) for row in same]
        if losses:
            print(name, trial, f"{statistics.mean(losses):.4f}", losses, [row["seconds"] for row in same])
    print(problem.facts)


def _known(name: str) -> list[dict[str, Any]]:
    """The rows that were written before under a name."""
    file = RESULTS / f"{name}.json"
    return list(json.loads(file.read_text())["results"]) if file.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for key, value in sorted(row.items()) if key not in ("loss", "curve", "seconds"))


def _best(rows: list[dict[str, Any]], problem: Problem, name: str) -> Trial | None:
    """The compiled tuning trial of seed 0 with the lowest loss; for KFAC its defaults."""
    if name == "kfac":
        return replace(KFAC, steps=problem.steps, problem=problem.name)
    wanted = (name, problem.name, problem.steps, 0)
    own = [r for r in rows if (r["optimizer"], r["problem"], r["steps"], r["seed"]) == wanted]
    if not own:
        return None
    found = min(own, key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf)
    return replace(
        Trial(**{key: value for key, value in found.items() if key not in ("loss", "curve", "seconds")}), compiled=True
    )


if __name__ == "__main__":
    main()
