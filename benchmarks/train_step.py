"""A step of `gramian train` over a step of a hand-written loop of the same model, optimizer and batches, in one run.

"gramian train" is the whole `Trainer.run` in a thread that stops after every block of steps: data, forward, backward, clip and
step, the guard that judges every step, a snapshot every 20 steps and a line of metrics every 10. No evaluation and no
checkpoint falls into the blocks. "without snapshots" is the same with none; "hand-written" computes the loss, goes back, clips
and steps, and never looks at a number. bf16 autocast on a GPU, float32 on a CPU, run.deterministic = false everywhere. That all
compute the same is checked by the losses of the first block. On a GPU there are two batches: with the larger one the GPU is
busy all the time, with the smaller one the host is about as slow as the GPU, so that its noise shows.

Beside it, `gramian profile train` of the same config: compile mode, activation checkpointing, SDPA and AdamW's implementations,
each on and off.
"""

import argparse
import dataclasses
import gc
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks._timing import ratio, take_turns, write
from gramian.data import Batches, load_windows
from gramian.models.gpt import GPT
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.build.run_parts import build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.precision import resolve_precision
from gramian.train.loop.trainer import Ended, Trainer
from gramian.train.state.run_folder import RunFolder
from gramian.verify.profiles.train_profile import profile_train

BAR = 1.03
BLOCK = 20
"""Steps of a turn: as many as from one snapshot to the next, so that every turn has one."""
WARM_UP = 4
"""Blocks: until the buffers of all snapshots are there."""
NEVER = 10**9
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "model": {"layers": 12, "width": 768, "heads": 12},
        "data": {"length": 1024, "workers": 2},
    },
    "cpu": {
        "model": {"layers": 2, "width": 64, "heads": 4},
        "data": {"length": 64, "workers": 0, "limit_bytes": 1_000_000},
    },
}
BATCHES = {"cuda": (32, 16), "cpu": (8,)}
"""Windows of a step; the bar is for the first."""


def world_of(device: str) -> ProcessGrid:
    """One process."""
    return ProcessGrid(0, 1, torch.device(device, 0) if device == "cuda" else torch.device("cpu"), "one")


def config_of(device: str, batch: int, folder: str, steps: int, snapshot_every: int = BLOCK) -> Config:
    """A run of so many steps in which nothing but steps and snapshots falls due."""
    return parse_config(
        {
            "model": SIZES[device]["model"],
            "data": {**SIZES[device]["data"], "batch": batch},
            "run": {"folder": folder, "steps": steps, "device": device, "deterministic": False},
            "optimizer": {"lr": 1e-4},
            "schedule": {"kind": "constant", "warmup": 0},
            "checkpoint": {"snapshot_every": snapshot_every, "every": NEVER},
            "eval": {"every": NEVER, "windows": 1},
        }
    )


class InBlocks:
    """A whole `Trainer.run` in a thread, `BLOCK` steps at a call."""

    def __init__(self, config: Config, world: ProcessGrid) -> None:
        self.losses: list[float] = []
        self.ended: Ended | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._folder = RunFolder(config).__enter__()
        self._trainer = Trainer(build(config, world), self._folder, self._seen)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __call__(self) -> None:
        """One block."""
        self._go.release()
        self._stopped.acquire()
        if self._failure is not None:
            raise self._failure

    @property
    def rollbacks(self) -> int:
        """Of the guard: with any, blocks would not be of the same steps."""
        return self._trainer.guard.rollbacks

    def finish(self) -> None:
        """The rest of the run."""
        while self._thread.is_alive():
            self._go.release()
            self._thread.join(0.01)
        self._folder.__exit__(None, None, None)

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.ended = self._trainer.run()
        except BaseException as failure:  # told in the thread that waits
            self._failure = failure
        self._stopped.release()

    def _seen(self, outcome: Any, trainer: Trainer) -> None:
        self.losses.append(outcome.loss)
        if len(self.losses) % BLOCK == 0:
            self._stopped.release()
            self._go.acquire()


def hand_written(config: Config, device: torch.device) -> tuple[Callable[[], None], list[torch.Tensor], Batches]:
    """`BLOCK` steps of a plain loop at a call, and its losses."""
    training, _ = load_windows(config.data)
    model = build_model(config, training.vocabulary).to(device)
    optimizer = build_optimizer(model, config.optimizer, device)
    autocast = resolve_precision(config.precision, device).autocast
    data = config.data
    batches = Batches(
        training, batch=data.batch, seed=config.run.seed, workers=data.workers, prefetch=data.prefetch, device=device
    )
    following = batches.from_position(0)
    losses: list[torch.Tensor] = []
    assert isinstance(model, GPT)

    def block() -> None:
        for _ in range(BLOCK):
            (rows,) = next(following).micro
            with autocast():
                logits = model(rows["tokens"])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), rows["targets"].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(model.parameters(), config.optimizer.max_norm)
            optimizer.step()
            losses.append(loss.detach())

    return block, losses, batches


def measure(device: str, batch: int, rounds: int) -> dict[str, Any]:
    """Times of all, and their ratios to the hand-written loop: medians within rounds, and the least of each."""
    world = world_of(device)
    steps = BLOCK * (WARM_UP + rounds)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(device, batch, str(Path(folder, "one")), steps + BLOCK)
        never = config_of(device, batch, str(Path(folder, "other")), steps + BLOCK, snapshot_every=NEVER)
        runs = {"gramian train": InBlocks(config, world), "without snapshots": InBlocks(never, world)}
        block, losses, batches = hand_written(config, world.device)
        try:
            times = take_turns({**runs, "hand-written": block}, rounds, steps=1, warm_up=WARM_UP)
        finally:
            for run in runs.values():
                run.finish()
            batches.close()
    base = times["hand-written"]
    first = float(torch.stack(losses[:BLOCK]).mean())
    for name, run in runs.items():
        assert run.ended is not None and run.ended.reason == "done" and not run.rollbacks, name
        mean = statistics.fmean(run.losses[:BLOCK])
        assert abs(mean - first) < 0.01, f"{name}: loss {mean}, by hand {first}"
    return {
        "config": {section: dataclasses.asdict(getattr(config, section)) for section in ("model", "data", "optimizer")},
        "milliseconds": {name: 1e3 * statistics.median(seconds) / BLOCK for name, seconds in times.items()},
        "over_hand_written": {name: ratio(seconds, base) for name, seconds in times.items()},
        "least_over_least": {name: min(seconds) / min(base) for name, seconds in times.items()},
        "by_round": {
            name: [one / other for one, other in zip(seconds, base, strict=True)] for name, seconds in times.items()
        },
        "loss_of_first_block": first,
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-knobs", action="store_true", help="the ratio alone")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {"bar": BAR, "batches": {}}
    for batch in BATCHES[device]:
        found = results["batches"][str(batch)] = measure(device, batch, arguments.rounds)
        for name in ("gramian train", "without snapshots"):
            print(
                f"batch {batch}: {name} over a hand-written loop: {found['over_hand_written'][name]:.4f}, least over least "
                f"{found['least_over_least'][name]:.4f} (bar on a GPU: {BAR}), {found['milliseconds'][name]:.2f} ms"
            )
        gc.collect()
    if not arguments.no_knobs:
        torch.cuda.empty_cache() if device == "cuda" else None
        config = config_of(device, BATCHES[device][-1], "unused", BLOCK)
        results["profile"] = dataclasses.asdict(profile_train(config, world_of(device), compiled=device == "cuda"))
        for knob in results["profile"]["knobs"]:
            print(knob["name"], knob["what"], {way["name"]: round(way["ratio"], 3) for way in knob["variants"]})
    print(write("train_step" if device == "cuda" else "train_step_cpu", results))


if __name__ == "__main__":
    main()
