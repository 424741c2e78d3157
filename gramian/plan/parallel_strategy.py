"""Choose how a run is distributed over GPUs: the fastest strategy that fits, or the changes that would make one fit.

`decide` takes the model and run (`Needs`), a number of GPUs and the bytes of one, and returns a `Decision` with its table.
Strategies in the order of speed, with n GPUs ("block" is a transformer block):

| strategy | student | teacher | bytes on a GPU |
|---|---|---|---|
| one | complete | complete | all of both |
| ddp | complete | complete | the same |
| fsdp2 teacher + ddp student | complete | 1/n | plus the gathered part of the teacher: all outside its blocks, and two blocks |
| fsdp2, fsdp2 both | 1/n | 1/n | plus the gathered part of the student, weights and gradients |
| cache only | as one, ddp or fsdp2 | none | the teacher's outputs are read from a cache |

The strategy is called "fsdp2" when there is no teacher. Gradients of several micro-batches are accumulated unsharded, so FSDP2
shards them only if a step is one micro-batch; activations and autocast's copies of weights are never sharded. DDP keeps
gradients in its buckets. A tenth of a GPU's memory is left to the context, to workspaces and to fragmentation.

Nothing is allocated and no device is queried, so any number of GPUs of any size can be planned for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.plan.budget import USABLE, Budget, largest_fitting, smallest_fitting
from gramian.plan.proof_cost import plan_proof
from gramian.plan.transformer_memory import Needs

Strategy = Literal["one", "ddp", "fsdp2", "fsdp2 teacher + ddp student", "fsdp2 both", "cache only"]
Layout = Literal["one", "ddp", "fsdp2"]
Wish = Literal["auto", "ddp", "fsdp2"]
MOST_GPUS = 4096
"""Largest number of GPUs that a proposed change may ask for."""


@dataclass(frozen=True)
class StrategyRow:
    """One part of a GPU's memory, such as "weights", with its bytes under each strategy."""

    what: str
    arithmetic: str
    """The product that gives the part's bytes before sharding, as text."""
    sizes: tuple[int, ...]
    """Bytes of the part on one GPU, for each strategy of the table."""

    def cells(self) -> tuple[str, ...]:
        """Texts of a table line: the part, its arithmetic, and its bytes under each strategy."""
        return (self.what, self.arithmetic, *(format_bytes(size) if size else "-" for size in self.sizes))


@dataclass(frozen=True)
class Remedy:
    """A change with which training fits: `decide(remedy.needs, remedy.gpus, remedy.gpu_memory, remedy.wish).fits` is True."""

    change: str
    """The change in words, such as "data.micro_batch=4"."""
    needs: Needs
    gpus: int
    gpu_memory: int
    wish: Wish
    size: int
    """Bytes on one GPU after the change."""


@dataclass(frozen=True)
class Decision:
    """The chosen way to distribute a run over GPUs, and the bytes from which it was chosen.

    ```python
    decision = decide(Needs(gpt(50_257, 1024, 12, 768, 12), "bf16", length=1024, batch=32), gpus=4, gpu_memory=80 * 10**9)
    decision.strategy, decision.why  # "ddp", one line with the bytes
    ```
    """

    strategy: Strategy | None
    """The chosen strategy, or the one that the config demands although it does not fit; None: none fits."""
    student: Layout | None
    """How the trained model is distributed under `strategy`: "one", "ddp" or "fsdp2"; None: none fits."""
    fits: bool
    """True if the chosen strategy fits; False: none does, or the one that the config demands does not."""
    why: str
    """The reason for the decision in one line, with its bytes."""
    columns: tuple[Strategy, ...]
    """The strategies that were compared, fastest first: the columns of the table."""
    rows: tuple[StrategyRow, ...]
    """Parts of a GPU's memory with their bytes under each strategy; the last row is the sum."""
    usable: int
    """Bytes of one GPU that the plan may use."""
    remedies: tuple[Remedy, ...] = ()
    """Changes with which a strategy would fit; empty if the decision fits."""

    def bytes_of(self, strategy: Strategy) -> int:
        """Total bytes on one GPU under a strategy of `columns`; ValueError for another one."""
        return self.rows[-1].sizes[self.columns.index(strategy)]


@dataclass(frozen=True)
class _Way:
    """One strategy to distribute the run, with the bytes of each part of a GPU's memory, {part: bytes}."""

    strategy: Strategy
    student: Layout
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def decide(needs: Needs, gpus: int, gpu_memory: int, wish: Wish = "auto") -> Decision:
    """Choose the fastest strategy that fits into the GPUs' memory; where none does, the decision lists changes that would help.

    Args:
        needs: the model and how it is trained.
        gpus: number of GPUs, with one process on each.
        gpu_memory: bytes of one GPU.
        wish: "ddp" or "fsdp2" demands this layout of the student, whether it fits or not; "auto": the fastest that fits.

    Raises:
        GramianError: if `gpus` or `gpu_memory` is not positive.
    """
    if gpus < 1:
        raise GramianError(f"gpus: expected at least 1, got {gpus}")
    if gpu_memory < 1:
        raise GramianError(f"gpu memory: expected more than 0 bytes, got {gpu_memory}")
    usable = int(USABLE * gpu_memory)
    budget = Budget(usable)
    ways = _ways(needs, gpus, budget, wish)
    rows = tuple(_rows(needs, gpus, ways))
    columns = tuple(way.strategy for way in ways)
    chosen = next((way for way in ways if budget.fits(way.total)), None)
    if chosen is not None:
        why = _reason(chosen, ways, gpus, budget, wish, needs)
        return Decision(chosen.strategy, chosen.student, True, why, columns, rows, usable)
    least = min(ways, key=lambda way: way.total)
    remedies = tuple(_remedies(needs, gpus, gpu_memory, wish, least.total))
    what = ", or ".join(f"{remedy.change} ({format_bytes(remedy.size)})" for remedy in remedies)
    why = f"{least.strategy} needs {format_bytes(least.total)}, {budget} can be used; would fit: {what}"
    if wish == "auto":
        return Decision(None, None, False, f"nothing fits: {why}", columns, rows, usable, remedies)
    why = f"parallel.strategy={wish} does not fit: {why}"
    return Decision(ways[0].strategy, ways[0].student, False, why, columns, rows, usable, remedies)


def _ways(needs: Needs, gpus: int, budget: Budget, wish: Wish) -> list[_Way]:
    """The strategies that `wish` allows for a model on `gpus` GPUs, fastest first, with their bytes."""
    layouts: list[Layout] = ["one"] if gpus == 1 else ["ddp", "fsdp2"]
    if wish != "auto":
        layouts = ["one" if gpus == 1 and wish == "ddp" else wish]
    teacher = needs.teacher
    if teacher is None:
        return [_Way(layout, layout, _parts(needs, gpus, layout)) for layout in layouts]

    tokens = needs.windows(gpus) * needs.length
    complete = {"teacher": teacher.weights, "teacher's forward": teacher.working(tokens)}
    shard = complete | {"teacher": ceil(teacher.weights / gpus) + teacher.gathered}
    ways = []
    for layout in layouts:
        student = _parts(needs, gpus, layout)
        if layout == "fsdp2":
            ways.append(_Way("fsdp2 both", layout, student | shard))
        else:
            ways.append(_Way(layout, layout, student | complete))
            if gpus > 1:
                ways.append(_Way("fsdp2 teacher + ddp student", layout, student | shard))
    alone = [_Way("cache only", layout, _parts(needs, gpus, layout)) for layout in layouts]
    return [*ways, next((way for way in alone if budget.fits(way.total)), min(alone, key=lambda way: way.total))]


def _parts(needs: Needs, gpus: int, layout: Layout) -> dict[str, int]:
    """Bytes of the trained model on one GPU under a layout, {part: bytes}."""
    windows = needs.windows(gpus)
    activations = needs.activations(windows)
    shards = gpus if layout == "fsdp2" else 1
    accumulates = ceil(needs.batch / gpus) > windows
    parts = {
        "weights": ceil(needs.weights / shards),
        "gradients": needs.weights if accumulates else ceil(needs.weights / shards),
        "optimizer": ceil(needs.state / shards),
        "noise": ceil(needs.noise / shards),
        "activations": activations.kept,
        "casts of weights": activations.casts,
        "loss": activations.loss,
        "working": activations.working,
    }
    if needs.proof:
        parts["row proof"] = plan_proof(needs, windows).device
    if layout == "fsdp2":
        shape = needs.shape
        parts["gathered"] = 2 * needs.stored * (shape.rest_parameters + 2 * shape.block_parameters)
    return parts


def _rows(needs: Needs, gpus: int, ways: list[_Way]) -> Iterator[StrategyRow]:
    """One table row for each part of memory that some strategy has, and a last one with the sums."""
    for what, arithmetic in _arithmetic(needs, gpus).items():
        amounts = tuple(way.parts.get(what, 0) for way in ways)
        if any(amounts):
            yield StrategyRow(what, arithmetic, amounts)
    yield StrategyRow("sum", "", tuple(way.total for way in ways))


def _arithmetic(needs: Needs, gpus: int) -> dict[str, str]:
    """{part of memory: the product that gives its bytes before sharding, as text}."""
    shape, w, e = needs.shape, needs.stored, needs.computed
    windows = needs.windows(gpus)
    tokens = windows * needs.length
    batch = f"{windows:,} × {needs.length:,} tokens"
    activations, segment = needs.activations(windows), min(needs.checkpoint_blocks, shape.layers)
    block = needs.block(windows) // tokens
    stored = f"{batch} × {shape.layers:,} blocks × {block:,} B"
    if segment:
        stored = f"{batch} × {ceil(shape.layers / segment):,} segments × {shape.width:,} × {w} B"
    logits = 2 * tokens * w * shape.vocabulary
    working = f"gradient of logits: {batch} × {shape.vocabulary:,} × 2 × {w} B"
    if activations.working > logits:
        what = "segment" if segment else "block"
        working = f"backward of a {what}, less the loss: {batch} × {activations.working // tokens:,} B"
    less = f" − {needs.whitened:,} × {w} B" if needs.whitened else ""
    found = {
        "weights": f"{shape.parameters:,} × {w} B",
        "gradients": f"{shape.parameters:,} × {w} B",
        "optimizer": f"{shape.parameters:,} × {needs.states} × {w} B" + less,
        "noise": f"{shape.parameters:,} × {needs.noise_buffers} buffers × {w} B",
        "activations": stored,
        "casts of weights": f"{activations.casts // e:,} × {e} B",
        "loss": f"{batch} × ({shape.vocabulary:,} × {w} B + {activations.loss // tokens - shape.vocabulary * w:,} B)",
        "working": working,
        "gathered": f"2 × {w} B × ({shape.rest_parameters:,} + 2 × {shape.block_parameters:,})",
    }
    if needs.proof:
        found["row proof"] = f"{plan_proof(needs, windows).runs} runs of {batch}: the largest tensor, fingerprinted"
    if needs.teacher is not None:
        teacher = needs.teacher
        found["teacher"] = f"{teacher.shape.parameters:,} × {teacher.itemsize} B"
        found["teacher's forward"] = f"{batch} × {teacher.working(tokens) // tokens:,} B"
    return found


def _reason(chosen: _Way, ways: list[_Way], gpus: int, budget: Budget, wish: Wish, needs: Needs) -> str:
    """One line: the bytes of the chosen strategy, and those of the faster ones that do not fit."""
    where = "one GPU" if gpus == 1 else f"each of {gpus:,} GPUs"
    if needs.device == "cpu":
        where = "the CPU"
    faster = [way for way in ways[: ways.index(chosen)] if not budget.fits(way.total)]
    name = chosen.strategy if chosen.strategy != "cache only" else f"cache only, student {chosen.student}"
    demanded = "" if wish == "auto" else ", as parallel.strategy says"
    beside = "".join(f"; {way.strategy} would need {format_bytes(way.total)}" for way in faster)
    return f"{name}{demanded}: {format_bytes(chosen.total)} of {budget} on {where}{beside}"


def _remedies(needs: Needs, gpus: int, gpu_memory: int, wish: Wish, least: int) -> Iterator[Remedy]:
    """Changes with which the run would fit: single ones, else several at once, and last larger GPUs.

    `least` is the smallest number of bytes on one GPU over all strategies, without changes.
    """
    budget, windows = Budget.of_memory(gpu_memory), needs.windows(gpus)

    def fewest_bytes(changed: Needs, count: int = gpus, wish: Wish = wish) -> int:
        return min(way.total for way in _ways(changed, count, budget, wish))

    def fits(changed: Needs, count: int = gpus, wish: Wish = wish) -> bool:
        return budget.fits(fewest_bytes(changed, count, wish))

    def remedy(change: str, changed: Needs, count: int = gpus) -> Remedy:
        return Remedy(change, changed, count, gpu_memory, wish, fewest_bytes(changed, count))

    def smaller(size: int) -> Needs:
        return replace(needs, micro_batch=size)

    def recomputed(changed: Needs, count: int = gpus) -> Needs:
        sizes = range(1, (needs.shape.layers if needs.shape.whole_segments else 1) + 1)
        options = [replace(changed, checkpoint_blocks=size) for size in sizes]
        return min(options, key=lambda option: option.activations(option.windows(count)).total)

    found = []
    if wish != "auto" and fits(needs, wish="auto"):
        fewest = fewest_bytes(needs, wish="auto")
        found.append(Remedy("parallel.strategy=auto", needs, gpus, gpu_memory, "auto", fewest))
    size = largest_fitting(1, windows - 1, lambda size: fits(smaller(size)))
    if size:
        found.append(remedy(f"data.micro_batch={size}", smaller(size)))
    again = recomputed(needs)
    if fits(again):
        found.append(remedy(f"parallel.checkpoint_blocks={again.checkpoint_blocks}", again))
    if not found:
        size = largest_fitting(1, windows - 1, lambda size: fits(recomputed(smaller(size))))
        if size:
            both = recomputed(smaller(size))
            change = f"data.micro_batch={size} with parallel.checkpoint_blocks={both.checkpoint_blocks}"
            found.append(remedy(change, both))
    if needs.device == "cuda":
        leanest = needs
        count = smallest_fitting(gpus + 1, MOST_GPUS, lambda count: fits(needs, count))
        if not count and not found:
            leanest = recomputed(smaller(1))
            count = smallest_fitting(gpus + 1, MOST_GPUS, lambda count: fits(leanest, count))
        if count:
            extra = ""
            if leanest is not needs:
                extra = f" with data.micro_batch=1 and parallel.checkpoint_blocks={leanest.checkpoint_blocks}"
            found.append(remedy(f"{count:,} GPUs{extra}", leanest, count))
    yield from found
    gigabytes = ceil(least / USABLE / 1e9)
    what = "GPUs" if needs.device == "cuda" else "a machine"
    yield Remedy(f"{what} of {gigabytes:,} GB", needs, gpus, gigabytes * 10**9, wish, least)
