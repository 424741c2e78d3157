"""Run folders as runs leave them, written by hand in milliseconds."""

import json
import math
from pathlib import Path
from typing import Any

import tomli_w

STEPS = 60
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"folder": "runs/x", "steps": STEPS, "seed": 0},
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 2},
    "data": {"source": "embedded", "tokenizer": "bytes", "length": 32, "batch": 8},
    "optimizer": {"max_norm": 1.0},
}
RECORD = {
    "format": 1,
    "device": "x86_64",
    "processes": 1,
    "strategy": "one",
    "precision": "fp32",
    "parameters": 12345,
    "vocabulary": 257,
    "host_memory": {"snapshots": 3, "bytes_of_one": 1000, "bytes": 4000},
}
CLIPPING = {
    "columns": ["parameter", "way"],
    "rows": [["fc.weight", "gram"], ["total", "held 1 MB"]],
    "notes": ["rows: proven"],
}
NORMS = {"clip_norm": 1.0, "first_edge": 0.5, "ratio": 2.0**0.5, "nonfinite": 0}
"""Edges 0.5, 0.71, 1, 1.41, 2: six bins, of which the last three are clipped."""
COUNTS = [0, 1, 2, 3, 4, 0]


def step_line(step: int, attempt: int, **more: Any) -> dict[str, Any]:
    loss = 2 + 3 * math.exp(-step / 20)
    timing = {
        "elapsed": step / 10,
        "tokens_per_second": 1000.0 + step,
        "mfu": None,
        "memory_gib": 0.5,
        "data_wait": 0.01,
    }
    return {
        "step": step, "attempt": attempt, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2,
        "lr": 1e-3 * step, "grad_norm": 1.5, "clip_share": 0.25, "scale": None, "tokens": 256 * step, **more,
        "time": {**timing, "eval_share": 0.02},
    }  # fmt: skip


def eval_line(step: int, attempt: int, **more: Any) -> dict[str, Any]:
    loss = 2.1 + 3 * math.exp(-step / 20)
    line = {"step": step, "attempt": attempt, "validation_loss": loss, "validation_perplexity": math.exp(loss)}
    line["validation_bits_per_byte"] = loss / 2
    return {**line, "validation_tokens": 100, **more, "time": {"seconds": 0.1, "eval_share": 0.02}}


def write_run(
    folder: Path,
    lines: list[dict[str, Any]],
    events: list[dict[str, Any]] | None = None,
    record: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Path:
    """A run folder with these lines; sections add to the config."""
    folder.mkdir(parents=True)
    config = {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {**CONFIG, **sections}}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "record.json").write_text(json.dumps(record or RECORD))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    listed = events if events is not None else [{"step": STEPS, "clock": 1.8e9, "event": "done"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in listed))
    return folder


def plain(folder: Path) -> Path:
    """A run with a rollback from step 35 to 30, advice, and a checkpoint."""
    lines = [step_line(step, step - 1) for step in range(2, 36)]
    lines += [step_line(step, step + 4) for step in range(31, STEPS + 1)]
    lines += [eval_line(step, step + 4) for step in (40, STEPS)]
    lines.sort(key=lambda line: (line["attempt"], "loss" not in line))
    events = [
        {"step": 20, "clock": 1.8e9, "event": "checkpoint_written", "best": True},
        {
            "step": 30,
            "clock": 1.8e9,
            "event": "rollback",
            "from": 35,
            "to": 30,
            "reason": "loss spike",
            "skipped": [34],
        },
        {"step": 50, "clock": 1.8e9, "event": "advice", "text": "a lower optimizer.lr may help"},
        {"step": STEPS, "clock": 1.8e9, "event": "done"},
    ]
    return write_run(folder, lines, events)


def private(folder: Path, **sections: dict[str, Any]) -> Path:
    """A private run with its ε, norms and clipping plan."""
    names = ["loss", "perplexity", "clip_share", "tokens", "sample_norms"]
    norms = {"sample_norms": {**NORMS, "counts": COUNTS}, "not_covered_by_epsilon": names}
    lines: list[dict[str, Any]] = []
    for step in range(2, STEPS + 1, 2):
        lines.append(step_line(step, step - 1, **norms))
        if step % 20 == 0:
            hidden = ["validation_loss", "validation_perplexity", "validation_tokens"]
            lines.append(eval_line(step, step - 1, epsilon=step / 10, not_covered_by_epsilon=hidden))
    privacy = {
        "noise_multiplier": 1.0,
        "unit": "one window",
        "epsilon": "as accounted",
        "epsilon_not_valid_because": [],
    }
    events = [
        {"step": 2, "clock": 1.8e9, "event": "plans", "plans": {"clipping": CLIPPING}, "covered_by_epsilon": False},
        {"step": 20, "clock": 1.8e9, "event": "unhealthy", "problems": ["dead"], "covered_by_epsilon": False},
    ]
    options = {"target_epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 1.0}
    sections = {"privacy": options, **sections}
    return write_run(folder, lines, events, {**RECORD, "privacy": privacy}, **sections)


def distilled(folder: Path, teacher: Path) -> Path:
    """A spiking student of another run."""
    more = {"kl": 0.5, "ce": 2.0, "agreement": 0.4, "correlation": 0.8, "temperature": 2.0, "feature_loss": 0.0}
    more |= {"teacher_entropy": 1.5, "student_entropy": 1.7, "noise_scale": 40.0}
    more["layers"] = {
        "fc": {"input": 1.0, "zeros": 0.1, "gradient": 0.2},
        "embedding": {"zeros": None, "gradient": 0.02},
    }
    spikes = {"spikes": {"firing": 0.4, "dead": 0.02, "saturated": 0.0, "entropy": 0.7}, "teacher_cka": 0.6}
    lines = [step_line(step, step - 1, **more) for step in range(1, 31)] + [eval_line(30, 29, **spikes)]
    return write_run(folder, lines, None, None, teacher={"path": str(teacher)}, model={"kind": "goose"})


def curved(folder: Path) -> Path:
    """A folder of `gramian curvature`, of a model with two blocks."""
    names = ("embedding", "blocks.0.fc", "blocks.1.fc", "head")
    numbers = {"trace": 3.0, "max_eigenvalue": 1.0, "entropy_rank": 4.0, "participation_ratio": 2.0, "stable_rank": 1.5}
    numbers |= {"effective_dimension": 2.5, "condition_number": 30.0}
    layers = {name: {key: value * (i + 1) for key, value in numbers.items()} for i, name in enumerate(names)}
    curve = {"eigenvalues": [1.0, 0.1, 0.01], "ranks": [1, 3, 9]}
    density = {"eigenvalues": [0.01, 0.1, 1.0], "per_decade": [5.0, 3.0, 1.0], "standard_error": [0, 0, 0]}
    result = {
        "complete": True, "settings": {"fisher": "mc", "ekfac": False}, "data": {"tokens": 64},
        "plan": {"stages": {"K-FAC": 1000}}, "ggn": {"density": density},
        "kfac": {"metrics": {"layers": layers, "model": numbers}, "spectra": dict.fromkeys(names, curve), "density": density,
                 "record": {"layers": {name: {"approximation": "K-FAC"} for name in names}}},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "curvature.json").write_text(json.dumps(result))
    return folder


def natural(folder: Path, layers: int = 3) -> Path:
    """A run along natural gradients: a refresh every ten steps, from step 1 on, with so many layers."""
    lines = []
    for step in range(1, STEPS + 1):
        kfac = {"refresh": 1 + step // 10, "policy": "all", "damping_mode": "pi", "kappa_max": 1e6, "clip_share": 0.25}
        kfac["layers"] = {
            f"model.blocks.{i}.fc": {
                "T": 64, "lambda_A": 0.1 * (i + 1), "lambda_G": 0.01 * step, "kappa_A": 100.0 * (i + 1), "kappa_G": 5.0,
                "clip_A": 0.5, "clip_G": 0.0, "bounds": ["G"],
            }
            for i in range(layers)
        }  # fmt: skip
        fresh = {"kfac": kfac} if step % 10 == 1 else {}
        line = step_line(step, step - 1, trust_region=1 / step, **fresh)
        lines.append({**line, "time": {**line["time"], **({"refresh_seconds": step / 100} if fresh else {})}})
    return write_run(folder, lines, kfac={"update_freq": 10})
