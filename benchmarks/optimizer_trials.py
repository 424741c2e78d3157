"""The trials of `optimizer_race`: what is tuned for each optimizer on each problem, and which of those that ran is the best."""

import math
from dataclasses import dataclass, replace
from typing import Any


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
            *(Trial("kfac", 2.8e-3, 0.9, decay=decay) for decay in (0.03, 0.3, 1.0)),
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
            *(Trial("muon", 8e-3, 0.9, 2e-3, warmup=80, decay=decay) for decay in (0.03, 0.3, 1.0)),
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
            *(Trial("shampoo", 2e-3, 0.9, warmup=warmup) for warmup in (320, 480, 640)),
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
            *(Trial("sgd", 0.01, 0.99, decay=decay) for decay in (0.001, 0.003, 0.01, 0.03)),
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
            *(Trial("muon", 5.6e-3, 0.8, 3.2e-2, warmup=warmup) for warmup in (160, 320, 640)),
        ],
        "soap-1024": [
            *(Trial("soap-1024", 4e-3, beta, warmup=160) for beta in (0.9, 0.95, 0.98)),
            *(Trial("soap-1024", lr, 0.95, warmup=160) for lr in (2e-3, 8e-3)),
            *(Trial("soap-1024", lr, 0.95, warmup=500) for lr in (2e-3, 4e-3)),
            *(Trial("soap-1024", lr, 0.95) for lr in (1e-3, 4e-3)),
            Trial("soap-1024", 4e-3, 0.95, warmup=1000),
            *(Trial("soap-1024", 4e-3, 0.95, warmup=500, decay=decay) for decay in (0.03, 0.3, 1.0)),
        ],
        "shampoo": [
            *(Trial("shampoo", lr, 0.9) for lr in (3e-4, 1e-3, 3e-3)),
            *(Trial("shampoo", 1e-3, beta) for beta in (0.8, 0.95)),
            *(Trial("shampoo", lr, 0.9, warmup=500) for lr in (3e-4, 1e-3, 2e-3, 3e-3)),
            *(Trial("shampoo", 2e-3, 0.9, warmup=warmup) for warmup in (1000, 1200)),
            *(Trial("shampoo", 2e-3, 0.9, warmup=500, decay=decay) for decay in (0.03, 0.3)),
        ],
        "sgd": [
            *(Trial("sgd", lr, beta) for beta in (0.98, 0.99) for lr in (0.01, 0.03, 0.1)),
            Trial("sgd", 0.3, 0.98),
            Trial("sgd", 0.03, 0.995),
            *(Trial("sgd", lr, beta) for beta in (0.9, 0.95) for lr in (0.03, 0.1)),
            *(Trial("sgd", lr, 0.98, warmup=500) for lr in (0.03, 0.1)),
            *(Trial("sgd", 0.03, 0.98, warmup=500, decay=decay) for decay in (0.001, 0.003, 0.01, 0.03)),
            Trial("sgd", 0.03, 0.98, warmup=1000, decay=0.01),
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
        *(Trial("adamw", 4e-3, 0.9, warmup=warmup) for warmup in (800, 1000)),
        *(Trial("adamw", 4e-3, 0.9, warmup=600, decay=decay) for decay in (0.01, 0.03, 0.3)),
        Trial("muon", 4e-3, 0.98, 4e-3),
        *(Trial("muon", 4e-3, 0.95, 4e-3, warmup=warmup) for warmup in (160, 400)),
        *(Trial("muon", 4e-3, 0.95, 4e-3, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("soap", 8e-3, 0.9, warmup=warmup) for warmup in (160, 400)),
        *(Trial("soap", 8e-3, 0.9, decay=decay) for decay in (0.03, 0.3)),
        Trial("shampoo", 3e-4, 0.8),
        *(Trial("shampoo", lr, 0.9, warmup=warmup) for warmup in (160, 400, 600, 800) for lr in (1e-3, 3e-3)),
        *(Trial("shampoo", 1e-3, 0.9, warmup=400, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("sgd", lr, 0.9, warmup=warmup) for lr, warmup in ((0.03, 400), (0.1, 400), (1.0, 400))),
        *(Trial("sgd", 0.03, 0.9, decay=decay) for decay in (0.001, 0.01)),
    ],
    "cnn": [
        Trial("adamw", 8e-3, 0.99, warmup=160),
        *(Trial("adamw", 8e-3, 0.99, decay=decay) for decay in (0.03, 0.3)),
        *(Trial("muon", 6.4e-2, beta, 4e-3) for beta in (0.6, 0.7, 0.8, 0.85)),
        Trial("muon", 6.4e-2, 0.9, 4e-3, warmup=160),
        *(Trial("muon", 6.4e-2, 0.9, 4e-3, decay=decay) for decay in (0.03, 0.3)),
        Trial("soap", 8e-3, 0.999),
        Trial("soap", 8e-3, 0.99, warmup=160),
        *(Trial("soap", 8e-3, 0.99, decay=decay) for decay in (0.03, 0.3, 1.0)),
        Trial("shampoo", 1e-2, 0.8),
        Trial("shampoo", 1e-2, 0.9, warmup=160),
        *(Trial("shampoo", 1e-2, 0.9, decay=decay) for decay in (0.03, 0.3, 1.0)),
        Trial("sgd", 0.3, 0.99, warmup=160),
        *(Trial("sgd", 0.3, 0.99, decay=decay) for decay in (0.0, 0.0003, 0.001, 0.01, 0.03)),
        *(Trial("sgd", lr, 0.9, decay=0.001) for lr in (0.1, 0.3, 1.0)),
    ],
}
"""Trials around the best of `IMAGES`, which are of one problem."""
for _problem, _around in AROUND.items():
    GRIDS[_problem] = {name: grid + [one for one in _around if one.optimizer == name] for name, grid in IMAGES.items()}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the row of a run from others."""
    return tuple(value for key, value in sorted(row.items()) if key not in ("loss", "curve", "seconds"))


ALIKE = 0.005
"""Relative difference of losses below which two settings are not told apart: one trial run twice differs by as much."""


def best_trial(rows: list[dict[str, Any]], problem: str, steps: int, name: str) -> Trial | None:
    """The best setting that was tuned, compiled; for KFAC its defaults; None if there is no trial.

    It is the one with the lowest loss at seed 0. Of settings within ALIKE of that, it is one with the most seeds, so that the
    choice stays when it is run once more.
    """
    full = [r for r in rows if (r["optimizer"], r["problem"], r["steps"]) == (name, problem, steps)]
    own = [row for row in full if row["seed"] == 0 and math.isfinite(row["loss"])]
    if not own or name == "kfac":
        return replace(KFAC, steps=steps, problem=problem) if name == "kfac" else None
    runs = {(key_of({**row, "seed": 0, "compiled": True}), row["seed"]) for row in full}
    of = [setting for setting, _ in runs]
    lowest = min(row["loss"] for row in own)
    found = min(
        (row for row in own if row["loss"] <= (1 + ALIKE) * lowest),
        key=lambda row: (-of.count(key_of({**row, "compiled": True})), row["loss"]),
    )
    return replace(
        Trial(**{key: value for key, value in found.items() if key not in ("loss", "curve", "seconds")}), compiled=True
    )
