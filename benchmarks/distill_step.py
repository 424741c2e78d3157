"""A step of distillation from a cache of hidden states over a step with cross entropy alone, in one run.

Steps are those of the training loop (`Stepper`: forward, backward, clip, fused AdamW) on batches that `Batches` makes; nothing
waits for the device inside a turn, of four steps. All variants of a student share its weights and its optimizer:

    plain           whole logits and F.cross_entropy, as `gramian train` without a teacher
    fused           cross entropy alone through the fused loss, no teacher: what distillation is compared with
    cache           the same student taught from a cache of hidden states, T = 2: rows of a step are read during the one before
    cache, learned  the same, and T moves
    …, in halves    two micro-batches: rows of the second are read while the first goes back

The cache is a real one, of a teacher that is an embedding, a norm and a head of the right width: its hidden states mean
nothing and cost what any teacher's would. Row "forward and backward" leaves the optimizer out. "autocast" has float32
weights, as `gramian train` does; else weights are bfloat16. On a CPU small shapes in float32 stand in.

Beside the ratio stands what the teacher's head costs: 2·V·Dt operations a token, over those of the student's step.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._timing import RESULTS, ratio, synchronize, take_turns, write
from gramian.data import Batches, StepBatch, Windows
from gramian.data.token_stream import Stream
from gramian.distill import distill_loss
from gramian.distill.cache import Cache, CacheOptions, build_cache, open_cache
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.temperature import Temperature, TemperatureOptions
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teaching import Teaching
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.models.gpt import GPT, GPTConfig
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.config.config_sections import OptimizerSection, PrecisionSection
from gramian.train.loop.distilling_stepper import DistillingStepper
from gramian.train.loop.lookahead import announced
from gramian.train.loop.objective import Objective
from gramian.train.loop.plain_stepper import PlainStepper
from gramian.train.loop.precision import Precision, set_globals
from gramian.train.state.run_log import flops_per_token

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WORLD = ProcessGrid(0, 1, DEVICE, "one")
BAR = 1.10


@dataclass(frozen=True)
class Size:
    """A student and the teacher it is taught by."""

    layers: int
    width: int
    heads: int
    teacher_width: int
    vocabulary: int = 32000
    length: int = 1024
    batch: int = 16
    teacher_layers: int = 0
    """0: the stand-in; else a live GPT is measured too."""


SIZES = {
    "937M, teacher 4096": Size(16, 2048, 16, 4096),
    "124M-like, teacher 4096": Size(12, 768, 12, 4096),
    "small, teacher 1024 live": Size(6, 512, 8, 1024, teacher_layers=12),
}
TINY = {
    "tiny, teacher 64": Size(2, 32, 2, 64, vocabulary=199, length=16, batch=4),
    "tiny, teacher 48 live": Size(1, 16, 2, 48, vocabulary=199, length=16, batch=4, teacher_layers=2),
}
STEPS_OF_DATA = 4
"""Different batches; the cache of the first size is 0.5 GB."""


class StandIn(nn.Module):
    """Hidden states of some width for every token: norm(embedding), and a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, device=DEVICE)
        self.head = nn.Linear(width, vocabulary, bias=False, device=DEVICE)

    def hidden(self, tokens_BT: Tensor, documents_BT: Any = None, layers: Any = ()) -> tuple[Tensor, dict[int, Tensor]]:
        rows_BTD = self.embedding(tokens_BT)
        return torch.nn.functional.layer_norm(rows_BTD, rows_BTD.shape[-1:]), {}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.hidden(tokens_BT)[0])
        return logits_BTV


class FusedCrossEntropy(nn.Module):
    """Cross entropy through the fused loss, without a teacher; an objective for `Stepper`."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, coefficient: float, documents_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden_BTD, _ = self.model.hidden(tokens_BT)
        out = distill_loss(
            hidden_BTD.flatten(0, 1), self.model.head.weight, targets_BT.flatten(),
            kd_weight=0.0, ce_weight=1.0, num_terms=1.0 / coefficient,  # type: ignore[arg-type]
        )  # fmt: skip
        return out.loss, out.loss.detach() / coefficient


@torch.no_grad()
def fresh(config: GPTConfig) -> GPT:
    """A GPT with weights drawn on the device: on the host a billion of them take longer than all that is measured."""
    with patch.object(GPT, "init_weights"), DEVICE:
        model = GPT(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.02)
    return model


def drawn_windows(size: Size) -> Windows:
    """A stream of uniform tokens."""
    count = STEPS_OF_DATA * size.batch * size.length + 1
    tokens = np.random.default_rng(0).integers(0, size.vocabulary - 1, count).astype(np.uint16)
    edges = np.array([0, count], dtype=np.int64)
    return Windows(
        Stream([tokens], edges, vocabulary=size.vocabulary, end=size.vocabulary - 1, tokenizer="drawn"), size.length
    )


def cached(teacher: LiveTeacher, windows: Windows, folder: str) -> Cache:
    """Built and opened as `gramian cache` and `gramian train` do."""
    build_cache(folder, teacher, windows, CacheOptions(batch=4, measure_every=16), WORLD)
    return open_cache(folder, kind="hidden", windows_digest=windows.digest)


class Student:
    """One student's weights, optimizer and data, for all variants of its step."""

    def __init__(self, size: Size, windows: Windows, model: GPT, autocast: bool) -> None:
        self.size, self.windows, self.model = size, windows, model
        # Without autocast everything is in the dtype of the weights.
        self.numbers = Precision("bf16" if autocast else "fp32", DEVICE.type)
        self.optimizer = build_optimizer(model, OptimizerSection(lr=1e-5, weight_decay=0.0), DEVICE)

    def steps(self, micro_batch: int) -> Iterator[StepBatch]:
        """Batches without an end."""
        return Batches(
            self.windows, batch=self.size.batch, micro_batch=micro_batch, workers=0, device=DEVICE
        ).from_position(0)

    def variant(
        self, objective: nn.Module, teaching: Teaching | None = None, halves: bool = False, backward_alone: bool = False
    ) -> Callable[[], None]:
        """A step of the training loop."""
        made: Any = PlainStepper if teaching is None else partial(DistillingStepper, teaching=teaching)
        stepper = made(objective, self.optimizer, self.numbers, WORLD, max_norm=1.0, seed=0)
        batches = self.steps(self.size.batch // 2 if halves else 0)
        if teaching is not None and isinstance(teaching.source, Cache):
            batches = announced(batches, teaching.source)

        def step() -> None:
            batch = next(batches)
            if teaching is not None:
                teaching.begin(0)
            stepper.watch(batch) if backward_alone else stepper.take(batch, 1e-5)

        return step

    def taught(self, source: Any, learned: bool = False, **how: bool) -> Callable[[], None]:
        """A step of distillation."""
        options = TemperatureOptions(kind="adversarial" if learned else "fixed", start=2.0, free=0.0)
        temperature = Temperature(options, 1000, DEVICE)
        teaching = Teaching(source, temperature, FeatureSwitch(0.0, 0, 0.1), WORLD)
        return self.variant(DistillObjective(self.model, RowObjective()), teaching, **how)


@torch.no_grad()
def refuse_different(student: Student, one: nn.Module, other: nn.Module) -> None:
    """Two ways to the same loss."""
    batch = next(student.steps(0))
    (micro,) = batch.micro
    with student.numbers.autocast():
        first, second = (
            float(way(micro["tokens"], micro["targets"], 1.0 / batch.tokens)[1]) / batch.tokens for way in (one, other)
        )
    assert abs(first - second) < 0.01, f"plain {first}, fused {second}"


def peak_gib(step: Callable[[], None]) -> float | None:
    """At the top of one warm step; whatever else lives on the device counts too."""
    if not ON_GPU:
        return None
    step()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, size: Size, folder: str, rounds: int, steps: int, autocast: bool) -> dict[str, Any]:
    """All variants of one student."""
    windows = drawn_windows(size)
    dtype = torch.bfloat16 if ON_GPU and not autocast else torch.float32
    if size.teacher_layers:
        heads = size.teacher_width // 64 or 1
        teacher: nn.Module = GPT(
            GPTConfig(size.vocabulary, size.length, size.teacher_layers, size.teacher_width, heads)
        )
    else:
        teacher = StandIn(size.vocabulary, size.teacher_width)
    live = LiveTeacher(teacher.to(DEVICE, dtype), autocast=torch.bfloat16 if autocast and ON_GPU else None)
    cache = cached(live, windows, str(Path(folder, name.replace(" ", "_"))))
    model = fresh(GPTConfig(size.vocabulary, size.length, size.layers, size.width, size.heads)).to(dtype)
    student = Student(size, windows, model, autocast and ON_GPU)
    plain, fused = Objective(model), FusedCrossEntropy(model)
    refuse_different(student, plain, fused)
    variants: dict[str, Callable[[], None]] = {
        "plain": student.variant(plain),
        "fused": student.variant(fused),
        "cache": student.taught(cache),
        "cache, learned": student.taught(cache, learned=True),
    }
    base = dict.fromkeys(variants, "fused")
    if not autocast:
        variants |= {
            "fused, in halves": student.variant(fused, halves=True),
            "cache, in halves": student.taught(cache, halves=True),
            "fused, forward and backward": student.variant(fused, backward_alone=True),
            "cache, forward and backward": student.taught(cache, backward_alone=True),
        }
        base["cache, in halves"] = "fused, in halves"
        base["cache, forward and backward"] = "fused, forward and backward"
    if size.teacher_layers:
        variants |= {"live": student.taught(live), "live, in halves": student.taught(live, halves=True)}
        base |= {"live": "fused", "live, in halves": "fused, in halves"}
    peaks = {each: peak_gib(step) for each, step in variants.items()}
    times = take_turns(variants, rounds, steps, warm_up=1)
    cache.close()
    step_flops = flops_per_token(model, size.length)
    head = 2.0 * size.vocabulary * size.teacher_width
    result: dict[str, Any] = {
        "student_parameters": model.num_parameters(),
        "teacher_width": size.teacher_width,
        "tokens": size.batch * size.length,
        "autocast": autocast,
        "cache_bytes_per_token": cache.manifest.bytes_per_token,
        "teacher_head_over_student_step_flops": head / step_flops,
        "variants": {},
    }
    for each in variants:
        against = base.get(each, each)
        found = {
            "milliseconds": 1e3 * statistics.median(times[each]),
            "over": against,
            "ratio": ratio(times[each], times[against]),
            "by_round": [one / other for one, other in zip(times[each], times[against], strict=True)],
            "peak_gib": peaks[each],
        }
        result["variants"][each] = found
        memory = "" if peaks[each] is None else f", {peaks[each]:.1f} GiB"
        print(f"{name}: {each}: {found['milliseconds']:.2f} ms, {found['ratio']:.3f} × {against}{memory}", flush=True)
    print(f"{name}: the teacher's head is {head / step_flops:.1%} of the student's operations", flush=True)
    return result


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--only", help="sizes whose name contains this; others stay as they are in the JSON")
    parser.add_argument("--no-autocast", action="store_true", help="leave out the first size with float32 weights")
    arguments = parser.parse_args()
    set_globals(PrecisionSection(), deterministic=False)
    sizes = dict(SIZES if ON_GPU else TINY)
    first = next(iter(sizes))
    chosen = [(name, size, False) for name, size in sizes.items()]
    if not arguments.no_autocast:
        chosen.insert(1, (first, sizes[first], True))
    results: dict[str, Any] = {}
    file = "distill_step" if ON_GPU else "distill_step_cpu"
    if arguments.only and (RESULTS / f"{file}.json").is_file():
        results = json.loads((RESULTS / f"{file}.json").read_text())["results"]["sizes"]
    with tempfile.TemporaryDirectory() as folder:
        for name, size, autocast in chosen:
            title = f"{name}, autocast" if autocast else name
            if arguments.only and arguments.only not in title:
                continue
            results[title] = measure(title, size, folder, arguments.rounds, arguments.steps, autocast)
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
    if first in results:
        found = results[first]["variants"]["cache"]["ratio"]
        print(f"distillation from the cache over cross entropy alone: {found:.3f} (bar on an H200: {BAR})")
    print(write(file, {"bar": BAR, "sizes": results}))


if __name__ == "__main__":
    main()
