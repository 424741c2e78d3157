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
from benchmarks.optimizer_trials import GRIDS, Trial, best_trial, key_of


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
    rows = known_rows("optimizer_race")
    known = {key_of(row) for row in rows}
    rows += [row for name in options.merge for row in known_rows(name) if key_of(row) not in known]
    begin, name_of = len(rows), options.beside or "optimizer_race"
    done = {key_of(row) for row in rows}
    compiled: set[str] = set()

    def go(trial: Trial, tuning: bool = False) -> None:
        trial = replace(trial, steps=trial.steps or problem.steps, problem=problem.name)
        same = {key_of(asdict(trial)), *([key_of(asdict(replace(trial, compiled=False)))] if tuning else [])}
        untimed = [row for row in rows if row["seconds"] is None and key_of(row) in same]
        again = bool(untimed) and not (tuning or options.beside)  # where seconds count, a row without them runs again
        if (same & done and not again) or time.perf_counter() - begun > options.limit:
            return
        if trial.optimizer not in compiled and not options.beside:  # what is timed later
            train(problem, replace(trial, steps=45))
            compiled.add(trial.optimizer)
        if again:
            rows[:] = [row for row in rows if row not in untimed]
        rows.append(train(problem, trial) | ({"seconds": None} if options.beside else {}))
        done.add(key_of(rows[-1]))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}), flush=True)
        write(name_of, rows[begin:] if options.beside else rows)

    part, parts = map(int, options.part.split("/"))
    for name in options.tune:
        for trial in grid[name][part::parts]:
            go(trial, tuning=True)
    best = {name: found for name in grid if (found := best_trial(rows, problem.name, problem.steps, name))}
    for seed in range(options.first_seed, options.seeds):
        for name in best if options.of is None else options.of:
            go(replace(best[name], seed=seed))
    for name, _, steps in (one.partition(":") for one in options.shorter):
        for seed in range(options.first_seed, max(1, options.seeds)):
            go(replace(best[name], steps=int(steps), seed=seed))
    for name, trial in best.items():
        same = [row for row in rows if key_of({**row, "seed": 0}) == key_of(asdict(trial))]
        losses = [round(row["loss"], 4) for row in same]
        if losses:
            print(name, trial, f"{statistics.mean(losses):.4f}", losses, [row["seconds"] for row in same])
    print(problem.facts)


def known_rows(name: str) -> list[dict[str, Any]]:
    """The rows that were written before under a name."""
    file = RESULTS / f"{name}.json"
    return list(json.loads(file.read_text())["results"]) if file.exists() else []


if __name__ == "__main__":
    main()
