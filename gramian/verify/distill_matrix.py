"""Checks of distillation: fused loss against eager float64, caches against the live teacher, several processes against one.

Legend: N tokens, D width, V vocabulary, K stored ids of a token.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramian.data.token_stream import Stream
from gramian.data.windows import Windows
from gramian.distill.cache.builder import CacheOptions, build_cache
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.reader import open_cache
from gramian.distill.cache.topk_cache import GONE, TopK, fit_tail, place_knots
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.loss.fused_loss import distill_loss
from gramian.distill.teacher.live_teacher import LiveTeacher, shard_teacher
from gramian.distill.teacher.signal import DenseSignal, SparseSignal, Tail
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.models.goose.scan import scan, sequential_scan
from gramian.models.gpt import GPT, GPTConfig
from gramian.models.token_sampling import evaluation_mode
from gramian.oracles.dense_distill_loss import DistillReference, reference
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.wrap_data_parallel import wrap_data_parallel
from gramian.train.loop.objective import IGNORED
from gramian.verify.checks import Comparison, VerifyCheck, relative_error
from gramian.verify.model_layouts import gathered

TEMPERATURES = (1.0, 1.5, 2.0, 5.0, 10.0)
DIRECTIONS = (("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3))
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""{dtype: largest relative error} of losses and gradients."""
SLACKS = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""{dtype: error of dL/dT that is ignored}, in units of kd_weight · 2T · KL: terms of that size cancel in dL/dT at some T."""
KEPT = 24
"""Number of ids K of the teacher in the check of a top-k teacher."""


@dataclass(frozen=True)
class _Problem:
    """Sizes of a distillation problem: N tokens, V ids, widths of student and teacher; one token in five has no target."""

    N: int
    V: int
    width: int = 40
    teacher_width: int = 56

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.N * self.V)

        def draw(*shape: int, scale: float) -> Tensor:
            drawn = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(device=device, dtype=dtype)

        targets = torch.randint(self.V, (self.N,), generator=generator)
        targets[4::5] = IGNORED
        return {
            "hidden": draw(self.N, self.width, scale=1.0),
            "weight": draw(self.V, self.width, scale=0.3),
            "teacher_hidden": draw(self.N, self.teacher_width, scale=1.0),
            "teacher_weight": draw(self.V, self.teacher_width, scale=0.4),
            "targets": targets.to(device),
        }


def plan(grid: ProcessGrid) -> list[VerifyCheck]:
    """List the checks of distillation that these processes can run; nothing is computed yet."""
    device, checks = grid.device, []
    if grid.size == 1:
        for dtype in (torch.float64, torch.float32, *[torch.bfloat16] * (device.type == "cuda")):
            name, tolerance = f"loss, {str(dtype).removeprefix('torch.')}", TOLERANCES[dtype]
            for problem in (_Problem(37, 257), _Problem(1, 50), _Problem(64, 1000)):
                measure = partial(_dense, problem, dtype, device)
                checks.append(VerifyCheck(f"{problem.N} × {problem.V}", name, tolerance, measure))
            checks.append(VerifyCheck("top-k", name, tolerance, partial(_topk, _Problem(37, 257), dtype, device)))
        checks.append(VerifyCheck("37 × 257", "parts add up", 1e-12, partial(_parts, _Problem(37, 257), device)))
        checks.append(VerifyCheck("Goose", "scan = sequential", 1e-5, partial(_scan, device)))
        checks.append(VerifyCheck("GPT", "caches = live teacher", 1e-2, partial(_caches, grid)))
    checks.append(VerifyCheck("GPT", f"gradient on {grid.size} as on one", 1e-10, partial(_processes, grid)))
    return checks


def _compare(expected: DistillReference, found: dict[str, Tensor], case: str, slack: float) -> Iterator[Comparison]:
    yield Comparison("loss", case, relative_error(found["loss"], expected.loss))
    yield Comparison("student hidden", case, relative_error(found["hidden"], expected.hidden))
    yield Comparison("student weight", case, relative_error(found["weight"], expected.weight))
    off = abs(float(found["temperature"]) - float(expected.temperature))
    size = max(abs(float(expected.temperature)), 1e-30)
    yield Comparison("temperature", case, 0.0 if off <= slack else (off - slack) / size)


def _run(problem: dict[str, Tensor], temperature: float, **options: Any) -> dict[str, Tensor]:
    hidden, weight = (problem[name].clone().requires_grad_() for name in ("hidden", "weight"))
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    t = torch.tensor(temperature, dtype=wide, device=hidden.device, requires_grad=True)
    out = distill_loss(hidden, weight, problem["targets"], temperature=t, **options)
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None and t.grad is not None
    return {
        "loss": out.loss, "hidden": hidden.grad, "weight": weight.grad, "temperature": t.grad, "kl": out.kl,
    }  # fmt: skip


def _dense(problem: _Problem, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    given = problem.tensors(dtype, device)
    teacher_NV = given["teacher_hidden"].cpu().double() @ given["teacher_weight"].cpu().double().T
    for temperature in TEMPERATURES:
        for direction, beta in DIRECTIONS:
            options: dict[str, Any] = {"kd_weight": 0.7, "ce_weight": 0.4, "direction": direction, "beta": beta}
            expected = reference(
                given["hidden"], given["weight"], given["targets"], teacher_NV, temperature=temperature, **options
            )
            found = _run(given, temperature, teacher_hidden=given["teacher_hidden"],
                         teacher_weight=given["teacher_weight"], **options)  # fmt: skip
            slack = SLACKS[dtype] * 0.7 * 2 * temperature * abs(float(found["kl"]))
            yield from _compare(expected, found, f"{direction}, T = {temperature:g}", slack)


def _topk(problem: _Problem, dtype: torch.dtype, device: torch.device) -> Iterator[Comparison]:
    """Compare the loss with a top-k teacher at temperatures that are knots, where its tail curve is exact."""
    given = problem.tensors(dtype, device)
    teacher_NV = given["teacher_hidden"].double() @ given["teacher_weight"].double().T
    logits_NK, ids_NK = teacher_NV.topk(KEPT)
    rest_NV = teacher_NV.scatter(1, ids_NK, GONE)
    knots = place_knots(6, 1.0, 5.0)
    values_NQ, slopes_NQ = fit_tail(rest_NV, knots)
    tail = Tail(values_NQ, slopes_NQ, torch.tensor(knots, dtype=torch.float32, device=device))
    for knot in (knots[0], knots[2], knots[-1]):
        temperature = 1.0 / float(torch.tensor(knot, dtype=torch.float32))
        options: dict[str, Any] = {"kd_weight": 0.7, "ce_weight": 0.4, "direction": "forward"}
        expected = reference(
            given["hidden"], given["weight"], given["targets"], teacher_NV, temperature=temperature, kept_NK=ids_NK,
            **options,
        )  # fmt: skip
        found = _run(given, temperature, teacher_topk=(ids_NK, logits_NK.to(torch.float32), tail), **options)
        slack = max(SLACKS[dtype], 1e-5) * 0.7 * 2 * temperature * abs(float(found["kl"]))
        for comparison in _compare(expected, found, f"T = {temperature:.3g}", slack):
            # The curve is stored in float32.
            error = comparison.error - (2e-6 if dtype == torch.float64 else 0.0)
            yield Comparison(comparison.layer, comparison.case, 0.0 if error < 0 else error)


def _parts(problem: _Problem, device: torch.device) -> Iterator[Comparison]:
    """Check that losses and gradients of micro-batches with a common `num_terms` add up to those of the batch."""
    given = problem.tensors(torch.float64, device)
    terms = int((given["targets"] != IGNORED).sum())

    def run(rows: slice) -> dict[str, Tensor]:
        part = {name: t[rows] if t.shape[0] == problem.N else t for name, t in given.items()}
        return _run(
            part, 2.0, teacher_hidden=part["teacher_hidden"], teacher_weight=part["teacher_weight"], num_terms=terms
        )

    full, parts = run(slice(None)), [run(slice(0, 5)), run(slice(5, 6)), run(slice(6, None))]
    for name in ("loss", "weight", "temperature"):
        total = torch.stack([part[name] for part in parts]).sum(0)
        yield Comparison(name, "1 = 3 micro-batches", relative_error(total, full[name]))
    hidden = torch.cat([part["hidden"] for part in parts])
    yield Comparison("student hidden", "1 = 3 micro-batches", relative_error(hidden, full["hidden"]))


def _scan(device: torch.device) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 15, 16, 100, 1000):
        u = torch.randn(2, length, 12, generator=generator).to(device).requires_grad_()
        decay = torch.linspace(0, 1, 12, device=device).requires_grad_()
        sent = torch.randn(2, length, 12, generator=generator).to(device)
        states = scan(u, decay)
        found = torch.autograd.grad((states * sent).sum(), (u, decay))
        wide_u, wide_decay = (t.detach().cpu().double().requires_grad_() for t in (u, decay))
        expected_states = sequential_scan(wide_u, wide_decay)
        expected = torch.autograd.grad((expected_states * sent.cpu().double()).sum(), (wide_u, wide_decay))
        case = f"{length} tokens"
        yield Comparison("states", case, relative_error(states, expected_states))
        yield Comparison("input", case, relative_error(found[0], expected[0]))
        yield Comparison("decay", case, relative_error(found[1], expected[1]))


def _windows(tokens: int = 400, length: int = 16) -> Windows:
    """Windows of documents of unequal length, each document padded to windows of its own."""
    edges = np.array([0, 3, 40, 45, 130, 131, 250, tokens])
    drawn = np.random.default_rng(0).integers(0, 96, tokens)
    return Windows(Stream([drawn], edges, vocabulary=97, end=96), length, pack=False)


def _teacher(device: torch.device, dtype: torch.dtype) -> GPT:
    """A small GPT whose head is scaled up, so that its logits differ clearly."""
    model = GPT(GPTConfig(vocabulary=97, context=16, layers=2, width=32, heads=2), seed=3).to(device, dtype)
    with torch.no_grad():
        model.head.weight.mul_(20.0)
    return model


def _caches(grid: ProcessGrid) -> Iterator[Comparison]:
    """Compare a student's loss with cached hidden states and with cached top-k logits to that with the live teacher."""
    windows = _windows()
    live = LiveTeacher(_teacher(grid.device, torch.float32))
    student = DistillObjective(
        GPT(GPTConfig(vocabulary=97, context=16, layers=1, width=16, heads=2), seed=5).to(grid.device), RowObjective()
    )
    index = np.arange(len(windows))
    rows = {name: t.to(grid.device) for name, t in windows.stack(index).items()} | {"windows": torch.from_numpy(index)}

    def loss(signal: DenseSignal | SparseSignal | Any, temperature: float) -> Tensor:
        with evaluation_mode(student):
            found: Tensor = student(rows["tokens"], rows["targets"], 0.01, None, signal, temperature)[0]
        return found

    with tempfile.TemporaryDirectory() as folder:
        kinds = (("hidden", Hidden(), 1e-3, (1.0, 1.7, 2.0, 5.0)), ("top-64", TopK(k=64), 1e-2, (1.0, 1.7, 2.0)))
        for name, kind, slack, temperatures in kinds:
            path = Path(folder) / name
            build_cache(path, live, windows, CacheOptions(kind, shard_windows=7))
            cache = open_cache(path, windows_digest=windows.digest, teacher_hash=live.hash, verify="full")
            for temperature in temperatures:
                found = relative_error(loss(cache(rows), temperature), loss(live(rows), temperature))
                # Each kind has its own bound; errors are scaled to the check's tolerance.
                yield Comparison(name, f"T = {temperature:g}", found * 1e-2 / slack)
            cache.close()


def _processes(grid: ProcessGrid) -> Iterator[Comparison]:
    """Compare gradients of student and T under DDP or FSDP2, with uneven batches, to those of one process with all rows."""
    windows, device = _windows(), grid.device
    index = np.arange(len(windows))
    rows = {name: t.to(device) for name, t in windows.stack(index).items()}
    total = int((rows["targets"] != IGNORED).sum())

    def objective() -> DistillObjective:
        shape = GPTConfig(vocabulary=97, context=16, layers=2, width=16, heads=2)
        return DistillObjective(GPT(shape, seed=5).to(device, torch.float64), RowObjective())

    def gradients(module: nn.Module, live: LiveTeacher, part: dict[str, Tensor], factor: int) -> tuple[Any, Tensor]:
        t = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
        loss, _ = module(part["tokens"], part["targets"], factor / total, None, live(part), t)
        loss.backward()
        found = {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}
        assert t.grad is not None
        return found, t.grad / factor

    expected, slope = gradients(objective(), LiveTeacher(_teacher(device, torch.float64)), rows, 1)
    teacher = _teacher(device, torch.float64)
    if grid.size > 1:
        teacher = shard_teacher(teacher)  # type: ignore[assignment]
    cut = [len(index) * (rank**2) // grid.size**2 for rank in range(grid.size + 1)]
    mine = {name: t[cut[grid.rank] : cut[grid.rank + 1]] for name, t in rows.items()}
    if not len(mine["tokens"]):  # a row without targets
        mine = {name: t[:1].clone() for name, t in rows.items()}
        mine["targets"].fill_(IGNORED)
    module = wrap_data_parallel(objective(), grid)
    found, t_slope = gradients(module, LiveTeacher(teacher), mine, grid.size)
    for name, gradient in found.items():
        yield Comparison(name, grid.kind, relative_error(gathered(gradient), expected[name]))
    yield Comparison("temperature", grid.kind, relative_error(grid.sum_(t_slope), slope))
