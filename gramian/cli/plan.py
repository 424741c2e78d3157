"""`gramian plan CONFIG.toml [section.key=value …]`: whether a run fits into memory, and how it is spread over GPUs.

Nothing is allocated, so GPUs and memory that are not here can be planned for.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gramian.cli.command_errors import RunFailed
from gramian.cli.config_arguments import add_config_arguments, positive_integer
from gramian.cli.terminal import add_group, make_console, make_table, show
from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.plan.budget import Budget

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gramian.curvature.memory.curvature_plan import CurvaturePlan
    from gramian.plan.host_memory import HostPlan
    from gramian.plan.parallel_strategy import Decision
    from gramian.plan.transformer_memory import Kind, Needs
    from gramian.train.config.config import Config

GPUS_PER_HOST = 8
CLIP_NORM = (
    "C: the noise is σ·C, so that C and the learning rate move together; begin with the median of sample_norms in the log of a "
    'short run on public data, or take clip_function = "automatic" (no C) or "adaptive" (C follows the median privately)'
)
"""What a plan of a privacy budget says of the clip norm C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian plan` to a parser."""
    add_config_arguments(parser)
    add = parser.add_argument
    add("--gpus", type=positive_integer, metavar="N", help="how many to plan for (default: those of this machine)")
    add("--gpu-memory", type=_gigabytes, metavar="GB", help="10⁹ bytes of one (default: as much as those here have)")
    add("--gpus-per-host", type=positive_integer, metavar="N", help="processes that share a host (default: at most 8)")
    add(
        "--target-epsilon",
        type=_epsilon,
        metavar="E",
        help="batches, steps and noise that would spend this privacy budget",
    )
    add("--host-memory", type=_gigabytes, metavar="GB", help="10⁹ bytes of a host (default: what is available here)")


def run(arguments: argparse.Namespace) -> int:
    """Print the memory table of a config and whether, and how, its run fits. Returns the exit code.

    Raises:
        RunFailed: if the run does not fit into the memory of GPUs or host.
    """
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of, vocabulary_of
    from gramian.train.config.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if arguments.target_epsilon is not None:
        show(make_console(), *_budget(config, arguments.target_epsilon))
    place = _place(config, arguments.gpus, arguments.gpu_memory)
    vocabulary = vocabulary_of(config.data)
    needs = needs_of(config, vocabulary, place.precision(config), place.device)
    decision = decide(needs, place.gpus, place.memory, config.parallel.strategy)

    console = make_console()
    show(console, *_heading(config, needs, place, decision), _table(decision))
    if config.privacy is not None:
        show(console, f"unit of privacy: one {config.privacy.unit}")
        if config.privacy.max_physical_batch:
            show(console, "windows of a backward: planned when the run begins; the bytes here are those of one")
        show(console, *_noise(config, needs), *_private(needs, place))
        if config.privacy.metric == "kfac":
            show(
                console,
                "metric: 2 · (inputs² + outputs²) FLOPs more for each token and layer; noise as a whole on each process",
            )
    curvature = _curvature(config, vocabulary, place, max(place.gpus, 1)) if config.has_curvature else None
    if curvature is not None:
        heading = f"K-FAC on top of that, for a refresh of {config.data.batch * config.data.length:,} tokens:"
        show(console, "", heading, *curvature.grouped().splitlines(), "")
    if not decision.fits or decision.strategy is None:
        raise RunFailed(f"plan: {decision.why}")
    host = _host(config, vocabulary, place, decision, needs, arguments)
    show(console, str(host))
    if not host.fits:
        raise RunFailed(f"plan: {host.refusal}")
    show(console, decision.why)
    if curvature is not None:
        run_bytes, budget = decision.bytes_of(decision.strategy), Budget(decision.usable)
        total = curvature.total(place.device)
        line = f"with K-FAC: {format_bytes(run_bytes)} + {format_bytes(total)} of {budget}"
        if not budget.fits(run_bytes + total):
            remedy = f"kfac.memory_budget = {decision.usable - run_bytes}"
            raise RunFailed(f"plan: {line}; would fit: {'another optimizer' if config.kfac is None else remedy}")
        show(console, line)
    return 0


def _host(
    config: Config, vocabulary: int, place: _Place, decision: Decision, needs: Needs, arguments: argparse.Namespace
) -> HostPlan:
    """Plan the copies of the training state in host memory, under the parallel strategy that was chosen."""
    from gramian.plan.host_memory import available_memory, copy_bytes, plan_host
    from gramian.train.build.snapshot_budget import factor_bytes

    assert decision.strategy is not None
    factors = factor_bytes(_curvature(config, vocabulary, place, 1)) if config.has_curvature else 0
    sharded = decision.student == "fsdp2" and place.gpus > 1
    copy = copy_bytes(
        needs.shape.parameter_shapes,
        needs.stored,
        needs.states + needs.noise_buffers,
        shards=place.gpus if sharded else 1,
        pinned=place.device == "cuda",
        factors=factors,
    )
    available = arguments.host_memory
    if available is None and not place.simulated:
        available = available_memory()
        if place.device == "cpu":  # where the run itself is
            available = max(0, available - decision.bytes_of(decision.strategy))
    processes = min(place.gpus, arguments.gpus_per_host or GPUS_PER_HOST)
    return plan_host(copy, config.checkpoint.snapshots, processes, sharded, available)


@dataclass(frozen=True)
class _Place:
    """The devices that a run is planned for."""

    device: str
    gpus: int
    memory: int
    """Bytes of one GPU, or of the machine if the run is on the CPU."""
    capability: tuple[int, int] | None
    """CUDA compute capability of this machine's GPUs; None if the planned ones are not here."""
    simulated: bool

    def precision(self, config: Config) -> Kind:
        """The number format that the config's precision means on these devices; GPUs that are not here count as recent."""
        import torch

        from gramian.train.loop.precision import AMPERE, resolve_precision

        return cast(
            "Kind", resolve_precision(config.precision, torch.device(self.device), self.capability or AMPERE).kind
        )

    def __str__(self) -> str:
        if self.device == "cpu":
            return f"the CPU of this machine, {format_bytes(self.memory)} of memory"
        what = "1 GPU" if self.gpus == 1 else f"{self.gpus:,} GPUs"
        return f"{what} of {format_bytes(self.memory)}{' (simulated)' if self.simulated else ''}"


def _place(config: Config, gpus: int | None, memory: int | None) -> _Place:
    """The devices to plan for: from the options --gpus and --gpu-memory (None: not given, this machine's are used).

    Raises a GramianError if --gpus is given without --gpu-memory and this machine has no GPU.
    """
    if gpus is not None and memory is not None:
        return _Place("cuda", gpus, memory, None, simulated=True)

    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus is None and memory is None and (config.run.device == "cpu" or not here):
        return _Place("cpu", 1, _machine_memory(), None, simulated=False)
    if memory is None and not here:
        raise GramianError("argument --gpu-memory: none given and no GPU is here; expected gigabytes, such as 80")
    if memory is not None:
        return _Place("cuda", max(here, 1), memory, None, simulated=True)
    found = [torch.cuda.get_device_properties(index) for index in range(here)]
    capability = min((card.major, card.minor) for card in found)
    smallest = min(card.total_memory for card in found)
    return _Place("cuda", gpus or here, smallest, capability, simulated=gpus is not None and gpus != here)


def _machine_memory() -> int:
    """Bytes of memory that this process may use: those of the machine, or the limit of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return memory


def _heading(config: Config, needs: Needs, place: _Place, decision: Decision) -> list[str]:
    shape, windows = needs.shape, needs.windows(place.gpus)
    name = {"gpt": "GPT", "goose": "Goose"}.get(config.model.kind) or str(config.model.path)
    segments = needs.checkpoint_blocks
    activations = f"recomputed in segments of {segments}" if segments else "kept"
    lines = [
        f"{name}: {shape.layers:,} blocks, width {shape.width:,}, vocabulary {shape.vocabulary:,}, "
        f"{shape.parameters:,} parameters",
        f"{needs.precision}, {needs.optimizer}, micro-batches of {windows:,} × {needs.length:,} tokens, "
        f"{needs.batch:,} × {needs.length:,} in a step, activations {activations}",
        f"planned for {place}, of which {format_bytes(decision.usable)} can be used",
    ]
    if place.device == "cpu" and config.run.device != "cpu":
        lines[-1] += "; no GPU is here: --gpus and --gpu-memory plan for some"
    return lines


def _noise(config: Config, needs: Needs) -> list[str]:
    """Line on correlated noise: bands, bytes, and the noise in the weights against independent noise; none without it."""
    import math

    from gramian.privacy.noise.noise_strategy import NoiseStrategy

    privacy, steps = config.privacy, config.run.steps
    if privacy is None or privacy.bands is None:
        return []
    error = NoiseStrategy.of(privacy.noise, privacy.bands, steps).error(steps)
    return [
        f"noise {privacy.noise} over {privacy.bands} releases: {needs.noise_buffers} buffers, {format_bytes(needs.noise)}; in "
        f"the sums of {steps:,} releases {error:.3g} σC, of independent noise {math.sqrt((steps + 1) / 2):.3g} σC (σ differs "
        "at one ε: docs/concepts/correlated_noise.md)"
    ]


def _private(needs: Needs, place: _Place) -> list[str]:
    """Lines on the cost of the row proof (the test that rows of a batch do not mix), and on what the table leaves out."""
    from gramian.plan.proof_cost import plan_proof
    from gramian.privacy.audit.independence import numberings

    windows = needs.windows(place.gpus)
    proof, left_out = plan_proof(needs, windows), "Memory of clipping itself is not counted."
    if not needs.proof:
        return ['row proof: "off", as privacy.proof says', left_out]
    if not proof.runs:
        return ["row proof: not needed, a backward has one window", left_out]
    loss = numberings(windows) * proof.runs
    return [
        f"row proof, before the first step: {proof.runs} forwards and backwards of {windows:,} windows, and {loss} for the "
        f"loss; fingerprints of {format_bytes(proof.host)} on the host",
        left_out,
    ]


def _curvature(config: Config, vocabulary: int, place: _Place, processes: int) -> CurvaturePlan:
    """Plan the memory of a run's curvature on each of `processes` processes."""
    from gramian.train.build.memory_needs import plan_run_curvature
    from gramian.train.loop.precision import Precision

    numbers = Precision(place.precision(config), place.device)
    return plan_run_curvature(config, vocabulary, numbers, place.device, processes)


def _table(decision: Decision) -> RenderableType:
    """Table of the memory plan: a row per part of the state, a column per parallel strategy."""
    table = make_table()
    table.add_column("part", no_wrap=True)
    table.add_column("arithmetic")
    for strategy in decision.columns:
        style = "green" if strategy == decision.strategy and decision.fits else None
        table.add_column(strategy, justify="right", style=style)
    for row in decision.rows[:-1]:
        table.add_row(*row.cells())
    table.add_section()
    total = decision.rows[-1]
    table.add_row(*total.cells())
    budget = Budget(decision.usable)
    table.add_row("", f"of {budget}", *("fits" if budget.fits(size) else "too much" for size in total.sizes))
    return table


def _budget(config: Config, epsilon: float) -> list[RenderableType]:
    """Table of ways to spend a target ε (`budget_choices`) on a config's training data, by [privacy]'s δ and accountant.

    Reads and tokenises the data, whose number of windows decides.
    """
    import numpy as np

    from gramian.data import load_windows
    from gramian.data.document_rows import DocumentWindows
    from gramian.privacy.accounting.budget_choices import choices
    from gramian.privacy.noise.noise_strategy import check_noise, kind_of
    from gramian.train.config.config_sections import PrivacySection

    options = config.privacy or PrivacySection(target_epsilon=epsilon)
    windows = load_windows(config.data)[0]
    own = DocumentWindows(windows, by_user=options.unit == "user")
    records = len(windows) if options.unit == "window" else len(np.unique(own.units))
    batch, steps = config.data.batch, config.run.steps

    def rest(size: int, count: int) -> tuple[Any, ...]:
        if options.max_draw is not None and size > max(options.max_draw, batch):
            raise GramianError(f"privacy.max_draw: is {options.max_draw}; expected at least data.batch ({size})")
        if options.noise == "bandmf":
            check_noise(options.noise, options.bands, count)
        cut = () if options.max_draw is None else (records, options.max_draw)
        return cut or kind_of(options.noise, options.bands, size / records)

    same_samples, same_steps = choices(epsilon, options.delta, records, batch, steps, options.accountant, rest)
    table = make_table(
        "", ">batch", ">steps", ">σ", ">noise of a step / C", ">of all steps / C", ">samples",
        title=f"ε = {epsilon:g} at δ = {options.delta:g} for {records:,} {options.unit}s ({options.accountant})",
    )  # fmt: skip
    given = batch * steps
    add_group(table, "as many samples", (choice.cells(given) for choice in same_samples))
    add_group(table, "as many steps", (choice.cells(given) for choice in same_steps))
    best = min(same_samples, key=lambda choice: choice.total_noise)
    lines = [
        f"least noise for the samples of this config: data.batch={best.batch} run.steps={best.steps} "
        f"privacy.noise_multiplier={best.sigma:.4g} (rate of Poisson draws {best.batch / records:.3g})",
        CLIP_NORM,
    ]
    if options.delta >= 1 / records:
        lines.append(f"privacy.delta: {options.delta:g} is 1/records or more; expected below {1 / records:.1g}")
    return ["", table, *lines, ""]


def _epsilon(text: str) -> float:
    try:
        epsilon = float(text)
    except ValueError:
        epsilon = 0.0
    if not 0 < epsilon < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an ε above 0, such as 3")
    return epsilon


def _gigabytes(text: str) -> int:
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected gigabytes above 0, such as 80")
    return max(1, int(amount * 1e9))
