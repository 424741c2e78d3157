"""Runs of the training loop for `distill_evidence.py`: a config in, one dictionary of figures out, kept beside the run.

A run that a folder has already is not repeated, so that the parts of the evidence can be measured at different times, or by
several processes at once.
"""

import functools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks._timing import synchronize
from gramian.data import Windows, load_windows
from gramian.data.options import DataSection
from gramian.distill.cache import build_cache
from gramian.models.goose import goose_layers
from gramian.models.token_sampling import evaluation_mode
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build import run_parts as build_module
from gramian.train.build.build_teacher import cache_options, live_teacher
from gramian.train.build.run_parts import Parts, build
from gramian.train.config.config import Config, parse_config
from gramian.train.loop.deferred_metrics import StepOutcome
from gramian.train.loop.objective import logits_of
from gramian.train.loop.perplexity import Perplexity, perplexity
from gramian.train.loop.precision import resolve_precision, set_globals
from gramian.train.loop.trainer import Trainer
from gramian.train.state.run_folder import RunFolder, read_lines
from gramian.train.state.saved_run import load_run

ON_GPU = torch.cuda.is_available()
WORLD = ProcessGrid(0, 1, torch.device("cuda", 0) if ON_GPU else torch.device("cpu"), "one")
NEVER = 10**9
Change = Callable[[Parts], None]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    limit_bytes: int
    length: int
    batch: int
    """Windows of a student's step."""
    teacher_batch: int
    teacher: Mapping[str, Any]
    """[model] of the teacher."""
    teacher_steps: int
    student: Mapping[str, Any]
    """[model] of the students, whatever their kind: GPT and Goose have 12·width² parameters a block."""
    steps: Mapping[str, int]
    """Of the students, by part."""
    seeds: Mapping[str, Sequence[int]]
    """By part."""
    scored: int
    """Validation windows of the perplexity at the end."""
    evaluated: int
    """Validation windows of an evaluation on the way."""


H200 = Scale(
    limit_bytes=8_000_000,
    length=256,
    batch=32,
    teacher_batch=64,
    teacher={"layers": 6, "width": 384, "heads": 6, "dropout": 0.1},
    teacher_steps=4000,
    student={"layers": 3, "width": 192, "heads": 4},
    steps={"student": 1500, "temperature": 800, "goose": 700, "scan": 300},
    seeds={"student": range(3), "temperature": range(2), "goose": range(2), "scan": range(2)},
    scored=512,
    evaluated=64,
)
TINY = Scale(
    limit_bytes=300_000,
    length=32,
    batch=8,
    teacher_batch=16,
    teacher={"layers": 2, "width": 48, "heads": 2},
    teacher_steps=40,
    student={"layers": 1, "width": 24, "heads": 2},
    steps={"student": 12, "temperature": 12, "goose": 12, "scan": 8},
    seeds={"student": range(2), "temperature": range(1), "goose": range(1), "scan": range(1)},
    scored=16,
    evaluated=4,
)


class Bench:
    """A folder of runs at one scale."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder, self.scale = folder, scale
        self._warm: set[str] = set()

    # ---- configs -------------------------------------------------------------------------------------------------------

    def config(
        self,
        name: str,
        model: Mapping[str, Any],
        steps: int,
        *,
        seed: int = 0,
        lr: float = 2e-3,
        batch: int = 0,
        **sections: Any,
    ) -> Config:
        """A run on the embedded corpus; nothing but evaluations falls into it."""
        scale = self.scale
        return parse_config(
            {
                "run": {
                    "folder": str(self.folder / name), "seed": seed, "steps": steps, "deterministic": False,
                    "log_every": max(1, steps // 50),
                },
                "model": dict(model),
                "data": {
                    "limit_bytes": scale.limit_bytes, "length": scale.length, "batch": batch or scale.batch, "workers": 0,
                },
                "optimizer": {"lr": lr},
                "schedule": {"warmup": max(1, steps // 20), "floor": lr / 20},
                "checkpoint": {"snapshot_every": 200, "every": NEVER, "keep": 1},
                "eval": {"every": max(1, steps // 8), "windows": scale.evaluated},
                **sections,
            }
        )  # fmt: skip

    def teacher_config(self) -> Config:
        """Of the teacher."""
        return self.config(
            "teacher", self.scale.teacher, self.scale.teacher_steps, lr=1e-3, batch=self.scale.teacher_batch
        )

    def student_config(
        self, name: str, steps: int, seed: int, *, distilled: bool, model: Mapping[str, Any] | None = None, **told: Any
    ) -> Config:
        """Of a student; `told` goes into [teacher]."""
        shape = {**self.scale.student, **(model or {})}
        if not distilled:
            return self.config(name, shape, steps, seed=seed)
        teacher = {"source": "hidden", "cache": str(self.folder / "cache"), "temperature": 2.0, **told}
        return self.config(name, shape, steps, seed=seed, teacher=teacher)

    # ---- runs ----------------------------------------------------------------------------------------------------------

    def run(
        self, config: Config, change: Change | None = None, around: AbstractContextManager[Any] | None = None
    ) -> dict[str, Any]:
        """Train to the end, score the last state, and tell; or tell what was found before.

        Args:
            config: whose folder's name is that of the run.
            change: of the built parts, before the first step.
            around: in force for the whole run.
        """
        folder, name = Path(config.run.folder), Path(config.run.folder).name
        kept = folder / "result.json"
        if kept.is_file() and json.loads(kept.read_text())["config_hash"] == config.hash:
            print(f"  {name}: is there", flush=True)
            return json.loads(kept.read_text())  # type: ignore[no-any-return]
        self._warm_up(config)
        with around or nullcontext():
            found = self._trained(config, change)
        kept.write_text(json.dumps(found, indent=1) + "\n")
        health = "" if "spikes" not in found else f", {found['spikes']['dead']:.1%} dead"
        heat = "" if found["temperature"] is None else f", T {found['temperature']:.2f}"
        print(
            f"  {name}: perplexity {found['perplexity']:.3f}, {found['steps']} steps in {found['seconds']:.1f} s"
            f"{heat}{health}{'' if found['ended'] == 'done' else ', ' + found['ended']}",
            flush=True,
        )
        return found

    def _warm_up(self, config: Config) -> None:
        """A few steps of a model and loss that were not run yet: kernels are compiled, memory is taken."""
        kind = f"{config.model}{config.teacher is not None}"
        if kind in self._warm:
            return
        self._warm.add(kind)
        sections = (
            {"teacher": {"source": "hidden", "cache": config.teacher.cache}} if config.teacher is not None else {}
        )
        shape = {key: value for key, value in vars(config.model).items() if value is not None}
        self._trained(self.config(f"warm-{os.getpid()}", shape, 3, batch=config.data.batch, **sections), None)

    def _trained(self, config: Config, change: Change | None) -> dict[str, Any]:
        shutil.rmtree(config.run.folder, ignore_errors=True)
        clock: dict[int, float] = {}
        started = 0.0

        def seen(outcome: StepOutcome, trainer: Trainer) -> None:
            clock[outcome.attempt.step + 1] = time.perf_counter() - started - trainer.log.eval_seconds

        with RunFolder(config) as folder:
            with patch.object(build_module, "load_windows", windows_once):
                parts = build(config, WORLD)
            if change is not None:
                change(parts)
            trainer = Trainer(parts, folder, seen)
            synchronize()
            started = time.perf_counter()
            ended = trainer.run()
            scored = self.score(parts.model, parts.validation.stream, config)
            lines = list(read_lines(folder.path / "metrics.jsonl"))
            events = [event["event"] for event in read_lines(folder.path / "events.jsonl")]
        steps = [line for line in lines if "loss" in line]
        looks = [line for line in lines if "validation_loss" in line]
        last = {**steps[-1], **(looks[-1] if looks else {})}
        told = {
            key: last.get(key)
            for key in (
                "validation_loss", "kl", "agreement", "correlation", "teacher_cka",
                "temperature", "temperature_schedule_only",
            )
        }  # fmt: skip
        found = {
            "config_hash": config.hash,
            "ended": ended.reason,
            "seed": config.run.seed,
            "steps": config.run.steps,
            "parameters": sum(p.numel() for p in parts.model.parameters()),
            "perplexity": scored.perplexity,
            "loss": scored.loss,
            "scored_tokens": scored.tokens,
            "seconds": clock[max(clock)],
            "curve": [[line["step"], clock[line["step"]], line["validation_loss"]] for line in looks],
            "events": sorted({name for name in events if name not in ("checkpoint_written", "done", "eval_cost")}),
            "rollbacks": events.count("rollback"),
            **told,
        }
        if "spikes" in last:
            found["spikes"] = last["spikes"]
        return found

    def score(self, model: torch.nn.Module, stream: Any, config: Config) -> Perplexity:
        """Non-overlapping perplexity on the first windows of the validation data."""

        def logits(tokens_BT: Tensor) -> Tensor:
            return logits_of(model, tokens_BT)

        with evaluation_mode(model), resolve_precision(config.precision, WORLD.device).autocast():
            return perplexity(logits, stream, WORLD, length=self.scale.length, rows=64, limit=self.scale.scored)

    def teacher(self) -> dict[str, Any]:
        """Train it and write its cache, or tell what is there."""
        config = self.teacher_config()
        found = self.run(config)
        kept, of_cache = self.folder / "cache", self.folder / "cache.json"
        if of_cache.is_file() and (told := json.loads(of_cache.read_text()))["teacher"] == found["config_hash"]:
            return {**found, "cache": told}
        shutil.rmtree(kept, ignore_errors=True)
        student = self.student_config("unused", 100, 0, distilled=True, path=config.run.folder)
        set_globals(student.precision, False)
        started = time.perf_counter()
        training, validation = windows_once(student.data)
        live = live_teacher(student, WORLD, resolve_precision(student.precision, WORLD.device), training)
        options = replace(cache_options(student, training.vocabulary), batch=self.scale.teacher_batch)
        manifest = build_cache(kept, live, training, options, WORLD)
        seconds = time.perf_counter() - started
        # Students are taught by the best checkpoint, not by the last state.
        taught_by = load_run(config.run.folder)
        best = self.score(taught_by.model.to(WORLD.device), validation.stream, config)
        cache = {
            "teacher": config.hash,
            "seconds": seconds,
            "bytes_per_token": manifest.bytes_per_token,
            "tokens": manifest.identity.count * manifest.identity.length,
            "largest_logit_error": manifest.errors.worst["logit"],
            "best_step": taught_by.step,
            "best_perplexity": best.perplexity,
            "best_loss": best.loss,
        }
        of_cache.write_text(json.dumps(cache) + "\n")
        return {**found, "cache": cache}

    def require_teacher(self) -> dict[str, Any]:
        """As `teacher`, where it was made before.

        Raises:
            SystemExit: if it was not.
        """
        if not (self.folder / "cache.json").is_file():
            raise SystemExit(f"{self.folder} has no teacher: run with --only teacher first")
        return self.teacher()


@functools.cache
def windows_once(data: DataSection) -> tuple[Windows, Windows]:
    """As `load_windows`; all runs read the same."""
    return load_windows(data)


# ---- the recurrence as the seed had it ---------------------------------------------------------------------------------------


def scalar_decay(parts: Parts) -> None:
    """One initial decay for all channels, σ(−0.5) = 0.378: a memory of one or two tokens."""
    with torch.no_grad():
        for module in parts.model.modules():
            if isinstance(module, goose_layers.LeakyMemory):
                module.decay_logit.fill_(-0.5)


def eps_scan(
    input_BTD: Tensor, decay_D: Tensor, keep_BT: Tensor | None = None, initial_BD: Tensor | None = None
) -> Tensor:
    """S = cumsum(u / (dᵗ + 1e-8)) · dᵗ: right only while dᵗ is well above 1e-8."""
    assert keep_BT is None and initial_BD is None
    time_T1 = torch.arange(input_BTD.shape[1], device=input_BTD.device, dtype=torch.float32).unsqueeze(1)
    power_TD = decay_D.float() ** time_T1
    return (input_BTD.float() / (power_TD + 1e-8)).cumsum(1) * power_TD


@contextmanager
def eps_scan_back() -> Iterator[None]:
    """Goose with that recurrence, for a while."""
    with patch.object(goose_layers, "scan", eps_scan):
        yield


# ---- several seeds ---------------------------------------------------------------------------------------------------------


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread of runs that differ in their seed alone, and the runs."""

    def of(key: str) -> dict[str, float] | None:
        values = [float(run[key]) for run in runs if run.get(key) is not None]
        if not values:
            return None
        return {"mean": statistics.fmean(values), "least": min(values), "most": max(values)}

    keys = (
        "perplexity",
        "loss",
        "seconds",
        "steps",
        "temperature",
        "temperature_schedule_only",
        "agreement",
        "correlation",
    )
    summary = {key: found for key in (*keys, "kl", "teacher_cka") if (found := of(key)) is not None}
    if "spikes" in runs[0]:
        summary["spikes"] = {
            key: statistics.fmean(run["spikes"][key] for run in runs)
            for key in ("firing", "dead", "saturated", "entropy")
        }
    return {"parameters": runs[0]["parameters"], **summary, "runs": list(runs)}
