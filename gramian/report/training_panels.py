"""Panels of training: loss, perplexity and bits per byte, distillation, learning rate, gradient norm, spikes, speed, memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gramian.report.chart_specs import Reference
from gramian.report.panel import Panel
from gramian.report.run_data import Line, RunData, number, read_run
from gramian.report.step_curves import Getter, field, nested, step_panel, timed

LOSS, TEACHING, OPTIMIZER, SPIKES, SPEED = "Loss", "Distillation", "Optimizer", "Spike health", "Speed and memory"
LAYERS = "Layer health"
LOSS_SOURCES = ("loss", "validation_loss")
COMPARED = ("source", "files", "validation_files", "tokenizer", "length", "limit_bytes", "pack")
"""Keys of [data] that teacher and student share if their validation losses can be compared."""


def training_panels(runs: Sequence[RunData], most: int) -> list[Panel]:
    """All panels of training that have data; at most `most` rows for each run in a table."""
    panel = partial(step_panel, runs, most)
    return [
        found for found in (*_loss(panel, runs), *_teaching(panel), *_optimizer(panel, runs), *_health(panel)) if found
    ]


def speed_panels(runs: Sequence[RunData], most: int) -> list[Panel]:
    """Panels of throughput, memory and waiting that have data."""
    panel = partial(step_panel, runs, most, SPEED)
    found = (
        panel(
            "Throughput",
            {"tokens per second": timed("tokens_per_second")},
            axis="tokens per second",
            sources=["tokens"],
        ),
        panel("Model FLOPs utilisation", {"MFU": timed("mfu")}, axis="share of peak", percent=True, sources=["tokens"]),
        panel("Peak memory", {"peak memory": timed("memory_gib")}, axis="GiB", sources=["tokens"]),
        panel(
            "Waiting for data, and evaluation",
            {"waiting for data": timed("data_wait"), "evaluation": timed("eval_share")},
            axis="share of time",
            percent=True,
            sources=["tokens"],
        ),
    )
    return [one for one in found if one]


def best_evaluation(run: RunData) -> Line | None:
    """The evaluation with the lowest validation loss among those that no rollback took back; None if there is none."""
    found = [
        line
        for place, line in enumerate(run.lines)
        if place not in run.taken_back and number(line.get("validation_loss")) is not None
    ]
    return min(found, key=lambda line: float(line["validation_loss"]), default=None)


def teacher_references(runs: Sequence[RunData], name: str) -> list[Reference]:
    """Number `name` of the best evaluation of each run's teacher, where that is a run on the same data, as reference lines."""
    found = []
    for run in runs:
        path = run.option("teacher", "path")
        if not isinstance(path, str) or not path or not (Path(path) / "metrics.jsonl").is_file():
            continue
        teacher = read_run(Path(path), "teacher")
        best = best_evaluation(teacher)
        value = None if best is None else number(best.get(name))
        if value is not None and all(run.option("data", key) == teacher.option("data", key) for key in COMPARED):
            found.append(Reference(run.name, "teacher", value))
    return found


def _loss(panel: Any, runs: Sequence[RunData]) -> Iterable[Panel | None]:
    dashed = "Dashed: the teacher's best validation loss in its own run."
    per_byte = (
        "Of the text, so that runs with different tokenizers compare. The end of a document is a token of no bytes."
    )
    for title, name, axis, note in (
        ("Loss", "loss", "nats per token", dashed),
        ("Perplexity", "perplexity", "perplexity", ""),
        ("Bits per byte", "bits_per_byte", "bits per byte", per_byte),
    ):
        teachers = teacher_references(runs, f"validation_{name}")
        yield panel(
            LOSS,
            title,
            {"training": field(name), "validation": field(f"validation_{name}")},
            axis=axis,
            sources=LOSS_SOURCES,
            note=note if teachers or note != dashed else "",
            log=name == "perplexity",
            references=teachers,
        )


def _teaching(panel: Any) -> Iterable[Panel | None]:
    yield panel(
        TEACHING,
        "Terms of the loss",
        {
            "KL to the teacher": field("kl"),
            "cross entropy": _with_teacher("ce"),
            "features": _unless_zero("feature_loss"),
        },
        axis="nats per token",
        note="The KL is at temperature T, without the factor T².",
    )
    yield panel(
        TEACHING,
        "Entropy at temperature T",
        {"teacher": field("teacher_entropy"), "student": field("student_entropy")},
        axis="nats per token",
    )
    yield panel(TEACHING, "Temperature", {"temperature": field("temperature")}, axis="T")
    yield panel(
        TEACHING,
        "Agreement with the teacher",
        {
            "same first token": field("agreement"),
            "correlation of log-probabilities": field("correlation"),
            "CKA of hidden states": field("teacher_cka"),
        },
        axis="agreement",
        note="Share of tokens that both rank first; Pearson's r of the targets' log-probabilities; debiased CKA.",
    )


def _with_teacher(name: str) -> Getter:
    return lambda line: line.get(name) if "kl" in line else None


def _unless_zero(name: str) -> Getter:
    return lambda line: line.get(name) or None


def _optimizer(panel: Any, runs: Sequence[RunData]) -> Iterable[Panel | None]:
    yield panel(OPTIMIZER, "Learning rate", {"learning rate": field("lr")}, axis="learning rate")
    limits = []
    for run in runs:
        limit = None if run.is_private else number(run.option("optimizer", "max_norm"))
        if limit:
            limits.append(Reference(run.name, "clip norm", limit))
    private = any(run.is_private for run in runs)
    yield panel(
        OPTIMIZER,
        "Gradient norm",
        {"gradient norm": field("grad_norm")},
        axis="norm",
        log=True,
        references=limits,
        sources=["grad_norm"],
        note="Of private runs: the norm of the noised gradient, which ε covers." if private else "",
    )
    yield panel(
        OPTIMIZER,
        "Share of clipped gradients",
        {"clipped steps": _unless_private, "clipped samples": clipped_samples},
        axis="share",
        percent=True,
        sources=["clip_share", "sample_norms"],
        note="Steps: among the last ones that the guard looks at. Samples (private runs): of the step's draw.",
    )
    yield panel(
        OPTIMIZER,
        "Gradient noise scale",
        {"noise scale": field("noise_scale")},
        axis="windows",
        log=True,
        note="Number of windows in a batch above which its gradient is mostly signal: tr Σ / |G|² of their gradients.",
    )
    yield panel(OPTIMIZER, "Loss scale", {"loss scale": field("scale")}, axis="scale", log=True, sources=["scale"])


def _unless_private(line: Line) -> Any:
    """The share of clipped steps; a private run clips samples, and has a constant 0 there."""
    return None if "sample_norms" in line or "not_covered_by_epsilon" in line else line.get("clip_share")


def clipped_samples(line: Line) -> float | None:
    """Fraction of a step's samples whose gradient norm exceeded the clip norm; None without a histogram of norms."""
    norms = line.get("sample_norms")
    counts = norms.get("counts") if isinstance(norms, Mapping) else None
    if not isinstance(counts, list) or not all(isinstance(count, int) for count in counts) or not sum(counts):
        return None
    return sum(counts[len(counts) // 2 :]) / sum(counts)


def _over_layers(choose: Callable[[list[float]], float], name: str) -> Getter:
    """Getter of the largest or smallest value of a name over all layers of a line."""

    def get(line: Line) -> float | None:
        layers = line.get("layers")
        facts = (
            [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []
        )
        values = [value for layer in facts if (value := number(layer.get(name))) is not None]
        return choose(values) if values else None

    return get


def _health(panel: Any) -> Iterable[Panel | None]:
    yield panel(
        LAYERS,
        "Output gradient of layers",
        {"largest": _over_layers(max, "gradient"), "smallest": _over_layers(min, "gradient")},
        axis="root mean square",
        log=True,
        note="Of a window's own loss; curves that part are gradients that vanish or explode.",
    )
    yield panel(
        LAYERS,
        "Zeros in the input of layers",
        {"largest": _over_layers(max, "zeros"), "smallest": _over_layers(min, "zeros")},
        axis="share",
        percent=True,
        note="Units in front of the layer that are exactly 0.",
    )
    yield panel(
        SPIKES,
        "Channels that fire",
        {
            "firing rate": nested("spikes", "firing"),
            "dead": nested("spikes", "dead"),
            "saturated": nested("spikes", "saturated"),
        },
        axis="share",
        percent=True,
        sources=["spikes"],
        note="Spikes that are not 0; channels that fire on less than 0.1 % of tokens, and on more than 99.9 %.",
    )
    yield panel(
        SPIKES,
        "Entropy of a channel",
        {"entropy": nested("spikes", "entropy")},
        axis="bits",
        sources=["spikes"],
        note="Of its distribution over −1, 0 and 1; at most 1.585 bits.",
    )
