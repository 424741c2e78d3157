"""How a run is spread over GPUs: the fastest way whose bytes fit, or what would have to change.

In the order of speed, with n GPUs:

| strategy | student | teacher | a GPU holds |
|---|---|---|---|
| one | whole | whole | everything |
| ddp | whole | whole | the same |
| fsdp2 teacher + ddp student | whole | 1/n | what is gathered of the teacher on top: all outside its blocks, two blocks |
| fsdp2, fsdp2 both | 1/n | 1/n | what is gathered of the student on top, weights and gradients |
| cache only | as one, ddp or fsdp2 | none | its answers are read from a cache |

"fsdp2" is the name where there is no teacher. Gradients of several micro-batches add up whole before they are reduced, so under
FSDP2 they are sharded only if a step is one micro-batch; activations and autocast's copies of weights are never sharded. Under
DDP gradients lie in the buckets. A tenth of a GPU's memory is left to the context, to workspaces and to fragmentation.

Nothing is allocated and no device is asked: any number of GPUs of any size can be planned for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.plan.proof_cost import plan_proof
from gramian.plan.transformer_memory import Needs

Strategy = Literal["one", "ddp", "fsdp2", "fsdp2 teacher + ddp student", "fsdp2 both", "cache only"]
Layout = Literal["one", "ddp", "fsdp2"]
Wish = Literal["auto", "ddp", "fsdp2"]
USABLE = 0.9
"""Share of a GPU's memory that is planned with."""
MOST_GPUS = 4096
"""More are not proposed."""


@dataclass(frozen=True)
class StrategyRow:
    """One line of the table."""

    what: str
    arithmetic: str
    held: tuple[int, ...]
    """Bytes on a GPU, for each of the table's strategies."""


@dataclass(frozen=True)
class Remedy:
    """What would fit: `decide(remedy.needs, remedy.gpus, remedy.gpu_memory, remedy.wish)` does."""

    change: str
    """Such as "data.micro_batch=4"."""
    needs: Needs
    gpus: int
    gpu_memory: int
    wish: Wish
    held: int
    """Bytes on a GPU then."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and the arithmetic behind it."""

    strategy: Strategy | None
    """None: refused."""
    student: Layout | None
    """How what is trained is spread."""
    fits: bool
    """False: refused, or demanded although it does not fit."""
    why: str
    """One line."""
    columns: tuple[Strategy, ...]
    """The strategies that were weighed, fastest first."""
    rows: tuple[StrategyRow, ...]
    """The last is the sum."""
    usable: int
    """Bytes of a GPU that are planned with."""
    remedies: tuple[Remedy, ...] = ()
    """Empty if it fits."""

    def held(self, strategy: Strategy) -> int:
        """Bytes on a GPU."""
        return self.rows[-1].held[self.columns.index(strategy)]


@dataclass(frozen=True)
class _Way:
    """One strategy and what it holds on a GPU, by part."""

    strategy: Strategy
    student: Layout
    parts: dict[str, int]

    @property
    def held(self) -> int:
        return sum(self.parts.values())


def decide(needs: Needs, gpus: int, gpu_memory: int, wish: Wish = "auto") -> Decision:
    """The fastest strategy that fits.

    Args:
        needs: model and run.
        gpus: processes, one on each.
        gpu_memory: bytes of one.
        wish: "ddp" or "fsdp2" for the student, whether it fits or not; "auto": what fits.

    Returns:
        The decision; a refusal says what would fit.

    Raises:
        GramianError: naming what is not positive.
    """
    if gpus < 1:
        raise GramianError(f"gpus: expected at least 1, got {gpus}")
    if gpu_memory < 1:
        raise GramianError(f"gpu memory: expected more than 0 bytes, got {gpu_memory}")
    usable = int(USABLE * gpu_memory)
    ways = _ways(needs, gpus, usable, wish)
    rows = tuple(_rows(needs, gpus, ways))
    columns = tuple(way.strategy for way in ways)
    chosen = next((way for way in ways if way.held <= usable), None)
    if chosen is not None:
        why = _reason(chosen, ways, gpus, usable, wish, needs)
        return Decision(chosen.strategy, chosen.student, True, why, columns, rows, usable)
    least = min(ways, key=lambda way: way.held)
    remedies = tuple(_remedies(needs, gpus, gpu_memory, wish, least.held))
    what = ", or ".join(f"{remedy.change} ({format_bytes(remedy.held)})" for remedy in remedies)
    why = f"{least.strategy} needs {format_bytes(least.held)}, {format_bytes(usable)} can be used; would fit: {what}"
    if wish == "auto":
        return Decision(None, None, False, f"nothing fits: {why}", columns, rows, usable, remedies)
    why = f"parallel.strategy={wish} does not fit: {why}"
    return Decision(ways[0].strategy, ways[0].student, False, why, columns, rows, usable, remedies)


def _ways(needs: Needs, gpus: int, usable: int, wish: Wish) -> list[_Way]:
    """What can be chosen from, fastest first."""
    layouts: list[Layout] = ["one"] if gpus == 1 else ["ddp", "fsdp2"]
    if wish != "auto":
        layouts = ["one" if gpus == 1 and wish == "ddp" else wish]
    teacher = needs.teacher
    if teacher is None:
        return [_Way(layout, layout, _parts(needs, gpus, layout)) for layout in layouts]

    tokens = needs.windows(gpus) * needs.length
    whole = {"teacher": teacher.weights, "teacher's forward": teacher.working(tokens)}
    shard = whole | {"teacher": ceil(teacher.weights / gpus) + teacher.gathered}
    ways = []
    for layout in layouts:
        student = _parts(needs, gpus, layout)
        if layout == "fsdp2":
            ways.append(_Way("fsdp2 both", layout, student | shard))
        else:
            ways.append(_Way(layout, layout, student | whole))
            if gpus > 1:
                ways.append(_Way("fsdp2 teacher + ddp student", layout, student | shard))
    alone = [_Way("cache only", layout, _parts(needs, gpus, layout)) for layout in layouts]
    return [*ways, next((way for way in alone if way.held <= usable), min(alone, key=lambda way: way.held))]


def _parts(needs: Needs, gpus: int, layout: Layout) -> dict[str, int]:
    """What the student takes on a GPU."""
    windows = needs.windows(gpus)
    activations = needs.activations(windows)
    shards = gpus if layout == "fsdp2" else 1
    accumulates = ceil(needs.batch / gpus) > windows
    parts = {
        "weights": ceil(needs.weights / shards),
        "gradients": needs.weights if accumulates else ceil(needs.weights / shards),
        "optimizer": ceil(needs.states * needs.weights / shards),
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
    """The table: parts that some strategy has, and the sum."""
    for what, arithmetic in _arithmetic(needs, gpus).items():
        held = tuple(way.parts.get(what, 0) for way in ways)
        if any(held):
            yield StrategyRow(what, arithmetic, held)
    yield StrategyRow("sum", "", tuple(way.held for way in ways))


def _arithmetic(needs: Needs, gpus: int) -> dict[str, str]:
    """Where the bytes come from, before sharding."""
    shape, w, e = needs.shape, needs.stored, needs.computed
    windows = needs.windows(gpus)
    tokens = windows * needs.length
    batch = f"{windows:,} × {needs.length:,} tokens"
    activations, segment = needs.activations(windows), min(needs.checkpoint_blocks, shape.layers)
    block = needs.block(windows) // tokens
    kept = f"{batch} × {shape.layers:,} blocks × {block:,} B"
    if segment:
        kept = f"{batch} × {ceil(shape.layers / segment):,} segments × {shape.width:,} × {w} B"
    logits = 2 * tokens * w * shape.vocabulary
    working = f"gradient of logits: {batch} × {shape.vocabulary:,} × 2 × {w} B"
    if activations.working > logits:
        what = "segment" if segment else "block"
        working = f"backward of a {what}, less the loss: {batch} × {activations.working // tokens:,} B"
    found = {
        "weights": f"{shape.parameters:,} × {w} B",
        "gradients": f"{shape.parameters:,} × {w} B",
        "optimizer": f"{shape.parameters:,} × {needs.states} × {w} B",
        "activations": kept,
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


def _reason(chosen: _Way, ways: list[_Way], gpus: int, usable: int, wish: Wish, needs: Needs) -> str:
    """Why the chosen one: what it holds, and what the faster ones would have."""
    where = "one GPU" if gpus == 1 else f"each of {gpus:,} GPUs"
    if needs.device == "cpu":
        where = "the CPU"
    faster = [way for way in ways[: ways.index(chosen)] if way.held > usable]
    name = chosen.strategy if chosen.strategy != "cache only" else f"cache only, student {chosen.student}"
    asked = "" if wish == "auto" else ", as parallel.strategy says"
    beside = "".join(f"; {way.strategy} would need {format_bytes(way.held)}" for way in faster)
    return f"{name}{asked}: {format_bytes(chosen.held)} of {format_bytes(usable)} on {where}{beside}"


def _remedies(needs: Needs, gpus: int, gpu_memory: int, wish: Wish, least: int) -> Iterator[Remedy]:
    """Single changes that make it fit; several at once where no single one does; larger GPUs at last."""
    usable = int(USABLE * gpu_memory)
    windows = needs.windows(gpus)

    def held(changed: Needs, count: int = gpus, wish: Wish = wish) -> int:
        return min(way.held for way in _ways(changed, count, usable, wish))

    def remedy(change: str, changed: Needs, count: int = gpus) -> Remedy:
        return Remedy(change, changed, count, gpu_memory, wish, held(changed, count))

    def smaller(size: int) -> Needs:
        return replace(needs, micro_batch=size)

    def recomputed(changed: Needs, count: int = gpus) -> Needs:
        sizes = range(1, (needs.shape.layers if needs.shape.whole_segments else 1) + 1)
        options = [replace(changed, checkpoint_blocks=size) for size in sizes]
        return min(options, key=lambda option: option.activations(option.windows(count)).total)

    found = []
    if wish != "auto" and held(needs, wish="auto") <= usable:
        found.append(Remedy("parallel.strategy=auto", needs, gpus, gpu_memory, "auto", held(needs, wish="auto")))
    size = _largest(1, windows - 1, lambda size: held(smaller(size)) <= usable)
    if size:
        found.append(remedy(f"data.micro_batch={size}", smaller(size)))
    again = recomputed(needs)
    if held(again) <= usable:
        found.append(remedy(f"parallel.checkpoint_blocks={again.checkpoint_blocks}", again))
    if not found:
        size = _largest(1, windows - 1, lambda size: held(recomputed(smaller(size))) <= usable)
        if size:
            both = recomputed(smaller(size))
            change = f"data.micro_batch={size} with parallel.checkpoint_blocks={both.checkpoint_blocks}"
            found.append(remedy(change, both))
    if needs.device == "cuda":
        leanest = needs
        count = _smallest(gpus + 1, MOST_GPUS, lambda count: held(needs, count) <= usable)
        if not count and not found:
            leanest = recomputed(smaller(1))
            count = _smallest(gpus + 1, MOST_GPUS, lambda count: held(leanest, count) <= usable)
        if count:
            extra = ""
            if leanest is not needs:
                extra = f" with data.micro_batch=1 and parallel.checkpoint_blocks={leanest.checkpoint_blocks}"
            found.append(remedy(f"{count:,} GPUs{extra}", leanest, count))
    yield from found
    gigabytes = ceil(least / USABLE / 1e9)
    what = "GPUs" if needs.device == "cuda" else "a machine"
    yield Remedy(f"{what} of {gigabytes:,} GB", needs, gpus, gigabytes * 10**9, wish, least)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest in [low, high] that fits, where all below one that fits do; 0: none."""
    if low > high or not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest in [low, high] that fits, where all above one that fits do; 0: none."""
    if low > high or not fits(high):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
