"""`gramian.optim.KFAC` beside tuned AdamW, Muon, SOAP, Shampoo and SGD: steps and seconds to a loss, in one harness.

Problem "bytes": GPT of 6 layers of width 384 on the embedded corpus, 64 × 256 bytes a step, float32 weights, bf16 autocast.
Every optimizer is tuned over learning rate and its second moment (or momentum) in runs of 800 steps with linear warm-up and a
cosine to zero; then the best of each runs on three seeds, and with fewer steps, each schedule ending at its own last step: how
many it needs for AdamW's loss. Seconds are of training alone, after one untimed run of 40 steps. Needs a GPU; SOAP and Shampoo
need the package pytorch_optimizer, and are left out without it.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import gramian
from benchmarks._timing import write
from benchmarks.optimizer_recipes import BATCH, LENGTH, batches, held_out, loss_of
from gramian.data import load_windows
from gramian.data.options import DataSection
from gramian.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Trial:
    """One run: an optimizer with its settings."""

    optimizer: str
    lr: float
    beta: float
    """β₂ of AdamW and SOAP; momentum of Muon, KFAC and SGD."""
    rest: float = 0.0
    """Learning rate of embeddings, head and vectors where the optimizer is for matrices; KFAC has its own rule."""
    steps: int = 800
    warmup: int = 40
    seed: int = 0


GRIDS = {
    "adamw": [Trial("adamw", lr, beta) for beta in (0.95, 0.99) for lr in (7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3)],
    "muon": [
        *(Trial("muon", lr, 0.95, rest) for lr in (4e-3, 8e-3, 1.6e-2) for rest in (1e-3, 2e-3)),
        *(Trial("muon", lr, 0.9, 2e-3) for lr in (4e-3, 8e-3, 1.6e-2)),
    ],
    "kfac": [
        *(Trial("kfac", lr, 0.9) for lr in (1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3)),
        *(Trial("kfac", lr, 0.95) for lr in (1.4e-3, 2e-3, 2.8e-3)),
    ],
    "soap": [Trial("soap", lr, beta) for beta in (0.95, 0.99) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "shampoo": [Trial("shampoo", lr, beta) for beta in (0.9, 0.95) for lr in (1e-3, 3e-3, 1e-2, 3e-2)],
    "sgd": [Trial("sgd", lr, beta) for beta in (0.9, 0.98) for lr in (0.03, 0.1, 0.3, 1.0)],
}


@dataclass
class Stepping:
    """Optimizers of one model, the context of its backward, and the parameters whose gradients are clipped."""

    optimizers: list[Any]
    capture: Callable[[], Any]
    clipped: list[nn.Parameter]


def stepping(model: nn.Module, trial: Trial) -> Stepping:
    """Build the optimizers of a trial: decay 0.1 for matrices, none for vectors, fused where torch has that."""
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
    mine = {id(p) for p in hidden} if trial.optimizer in ("muon", "kfac") else set()
    rest = [p for p in model.parameters() if id(p) not in mine]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        wide, narrow = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
        return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]

    nothing = contextlib.nullcontext
    if trial.optimizer == "kfac":
        own = gramian.optim.KFAC(model, lr=trial.lr, momentum=trial.beta)
        return Stepping([own], lambda: own.capture(num_terms=BATCH * LENGTH), rest)
    if trial.optimizer == "sgd":
        sgd = torch.optim.SGD(groups(rest), lr=trial.lr, momentum=trial.beta, nesterov=True, fused=True)
        return Stepping([sgd], nothing, rest)
    if trial.optimizer in ("soap", "shampoo"):
        import pytorch_optimizer

        if trial.optimizer == "soap":
            soap = pytorch_optimizer.SOAP(
                groups(rest), lr=trial.lr, betas=(0.95, trial.beta), precondition_frequency=10
            )
            return Stepping([soap], nothing, rest)
        shampoo = pytorch_optimizer.ScalableShampoo(
            groups(rest), lr=trial.lr, betas=(trial.beta, 0.99), preconditioning_compute_steps=10, graft_type=5
        )
        return Stepping([shampoo], nothing, rest)
    rate = trial.lr if trial.optimizer == "adamw" else trial.rest
    beta = trial.beta if trial.optimizer == "adamw" else 0.95
    adamw = torch.optim.AdamW(groups(rest), lr=rate, betas=(0.9, beta), fused=True)
    if trial.optimizer == "adamw":
        return Stepping([adamw], nothing, rest)
    muon = torch.optim.Muon(hidden, lr=trial.lr, momentum=trial.beta, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return Stepping([muon, adamw], nothing, rest)


def train(trial: Trial, training: Tensor, validation: Tensor) -> dict[str, Any]:
    """Train one model; returns the trial with its held-out losses and the seconds of training without evaluations."""
    torch.manual_seed(trial.seed)
    model = GPT(GPTConfig(vocabulary=257, context=LENGTH, layers=6, width=384, heads=6)).to("cuda")
    run, source = stepping(model, trial), batches(training, 1 + trial.seed)
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
            loss_of(model, next(source)).backward()
        nn.utils.clip_grad_norm_(run.clipped, 1.0)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == trial.steps:
            before = _now()
            curve[step + 1] = held_out(model, validation)
            aside += _now() - before
    return {**asdict(trial), "loss": curve[trial.steps], "curve": curve, "seconds": _now() - begun - aside}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Tune the optimizers that are named, or run the best of each on more seeds and with fewer steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="*", default=[], choices=list(GRIDS), help="optimizers to tune")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds of the best trial of each tuned optimizer")
    parser.add_argument("--steps", nargs="*", type=int, default=[], help="also runs of so many steps of KFAC and Muon")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further run begins")
    options, begun = parser.parse_args(), time.perf_counter()
    windows = load_windows(DataSection(limit_bytes=16_000_000, length=LENGTH))
    streams = [torch.from_numpy(w.stream.read(0, len(w.stream))).to("cuda", torch.int16) for w in windows]
    path, rows = None, _known()
    done = {_key(row) for row in rows}
    train(Trial("adamw", 1e-3, 0.95, steps=40), *streams)

    def go(trial: Trial) -> None:
        nonlocal path
        if _key(asdict(trial)) in done or time.perf_counter() - begun > options.limit:
            return
        rows.append(train(trial, *streams))
        done.add(_key(rows[-1]))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}), flush=True)
        path = write("optimizer_race", rows)

    for name in options.tune:
        for trial in GRIDS[name]:
            go(trial)
    best = {name: _best(rows, name) for name in GRIDS if any(row["optimizer"] == name for row in rows)}
    for seed in range(options.seeds):
        for trial in best.values():
            go(replace(trial, seed=seed))
    for steps in options.steps:
        for name in ("kfac", "muon"):
            for seed in range(max(1, options.seeds)):
                go(replace(best[name], steps=steps, seed=seed))
    for name, trial in best.items():
        losses = [r["loss"] for r in rows if _key({**r, "seed": 0}) == _key(asdict(trial))]
        print(name, trial, f"{statistics.mean(losses):.4f}", [round(loss, 4) for loss in losses])
    print(path)


def _known() -> list[dict[str, Any]]:
    """The rows that were written before."""
    from benchmarks._timing import RESULTS

    file = RESULTS / "optimizer_race.json"
    return list(json.loads(file.read_text())["results"]) if file.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("optimizer", "lr", "beta", "rest", "steps", "warmup", "seed"))


def _best(rows: list[dict[str, Any]], name: str) -> Trial:
    """The trial of 800 steps and seed 0 with the lowest loss."""
    own = [row for row in rows if (row["optimizer"], row["steps"], row["seed"]) == (name, 800, 0)]
    found = min(own, key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf)
    return Trial(*(found[key] for key in ("optimizer", "lr", "beta", "rest", "steps", "warmup", "seed")))


if __name__ == "__main__":
    main()
