"""Build an influence index: fit the Fisher to all passages, then compress and store each passage's gradient, shard by shard.

What is complete on disk is not computed again: a build that was killed goes on with the next shard (the fit of the factors
begins anew). Projections depend on the factors and the seed alone, so any split into shards stores the same gradients.

Several processes share the batches of the fit and the shards; the first one alone writes factors and index.json. Passage i is
sample i wherever it is read, so drawn labels and token subsets do not depend on the number of processes, which may change
between a build that was interrupted and the one that goes on.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.byte_amounts import format_bytes, parse_bytes
from gramian.core.durable_files import FileRecord
from gramian.core.errors import GramianError
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.persist import factor_file
from gramian.influence.corpus import PassageCorpus
from gramian.influence.gradient_sketch import GradientSketch, MatrixGradients, VectorGradients, rank_of
from gramian.influence.index_folder import FACTORS, PASSAGES, IndexFolder, build_lock, shard_name
from gramian.influence.passage_loss import passage_losses
from gramian.influence.relative_damping import set_relative_damping
from gramian.parallel.process_grid import ONE_PROCESS, ProcessGrid
from gramian.parallel.shared_work import SharedWork
from gramian.taps import Capture
from gramian.taps.model.user_names import named_parameters

SHARD = 256
"""Passages of a shard of compressed gradients."""
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, units done, units in total."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of an influence index, as in `BuildOptions(gradients="200MB")`."""

    factors: str = "ekfac"
    """"kfac", or "ekfac": K-FAC's eigenvectors with eigenvalues measured in a second pass."""
    fisher: str = "mc"
    """Labels behind the Fisher: "mc" (drawn from the model), "true" (also, with an exact head) or "empirical" (the text's)."""
    damping: float = 0.1
    """δ: λ of each block over its mean eigenvalue."""
    gradients: str | int | None = None
    """Bytes of all compressed gradients together, such as "200MB"; None: none are stored, and a query reads the passages."""
    memory_budget: str | int | None = None
    """Bytes for the factors; None: no limit."""
    only: tuple[str, ...] = ("*",)
    """Patterns of the names of the parameters whose gradients count, such as "*.mlp.*"; the rest of the model is frozen."""
    batch: int = 8
    """Passages of one backward."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a GramianError that names the first option whose value is not allowed."""
        for name, allowed in (("factors", ("kfac", "ekfac")), ("fisher", ("mc", "true", "empirical"))):
            if getattr(self, name) not in allowed:
                raise GramianError(f"{name}: {getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        if isinstance(self.damping, bool) or not isinstance(self.damping, int | float) or not 0 < self.damping < 1e6:
            raise GramianError(f"damping: {self.damping!r}; expected a number above 0, a share of the mean eigenvalue")
        if isinstance(self.only, str) or not self.only or not all(isinstance(one, str) for one in self.only):
            raise GramianError(f"only: {self.only!r}; expected a tuple of patterns, such as ('*.mlp.*',)")
        for name in ("batch", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "batch"):
                raise GramianError(f"{name}: {value!r}; expected a whole number")
        parse_bytes("gradients", self.gradients)
        parse_bytes("memory_budget", self.memory_budget)

    def kfac(self, dtype: torch.dtype, grid: ProcessGrid = ONE_PROCESS) -> KFACNaturalGradient:
        """The K-FAC object of an index, without factors, for a model of this dtype; `grid`: who shares its passages."""
        return KFACNaturalGradient(
            damping_mode="joint",
            woodbury_dtype="fp64" if dtype == torch.float64 else "fp32",
            kfac_true_fisher_head=self.fisher == "true",
            ekfac=self.factors == "ekfac",
            memory_budget=self.memory_budget,
            seed=self.seed,
            kfac_distributed_reduce="gram" if grid.size > 1 else "none",
            process_group=grid.group,
        )


def build_index(
    corpus: PassageCorpus,
    out: str | Path,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
    grid: ProcessGrid = ONE_PROCESS,
) -> IndexFolder:
    """Build the influence index of a corpus in a folder, or go on with one that was interrupted.

    ```python
    folder = build_index(corpus, "runs/index", BuildOptions(gradients="200MB"))
    ```

    Cost: a forward and a backward of every passage for the factors, another for EK-FAC, another for compressed gradients.

    Args:
        corpus: the model and its passages; the model is unchanged afterwards.
        out: a new folder, or that of an earlier build with the same corpus and options.
        options: see `BuildOptions`; None: the defaults.
        progress: called with ("factors", "eigenvalues" or "gradients", units done, units in total).
        grid: the processes that share the work, each with the whole model and all passages, in a folder that all of them
            see. Collective; scores are those of one process to rounding.

    Raises:
        GramianError: if the folder belongs to something else or another build writes there, options do not fit, or the
            gradients' bytes hold too little; on all processes if on one.
    """
    options, shared = BuildOptions() if options is None else options, SharedWork(grid)
    report = progress or (lambda stage, done, total: None)
    with ExitStack() as until_end:
        with shared.together():
            if not isinstance(corpus, PassageCorpus) or not isinstance(options, BuildOptions):
                raise GramianError("corpus, options: expected a PassageCorpus, and BuildOptions or None")
            refuse_training_mode(corpus.model)
            until_end.enter_context(counted_parameters(corpus.model, options.only))
            identity = {**corpus.digest(), "shape": list(corpus.tokens_NT.shape), "options": asdict(options)}
        _refuse_differences(shared.all(identity))

        def begin() -> dict[str, Any]:
            until_end.enter_context(build_lock(out))
            return _begun(corpus, out, identity).facts

        folder = IndexFolder(Path(out), shared.first(begin))
        kfac = _factors(corpus, folder, options, report, shared)
        if options.gradients is not None:
            _gradients(corpus, folder, kfac, options, report, shared)
        folder.facts["complete"] = True
        with shared.together():
            if grid.rank == 0:
                folder.write_facts()
    return folder


def _begun(corpus: PassageCorpus, out: str | Path, identity: dict[str, Any]) -> IndexFolder:
    """The folder of an index, with its passages."""
    folder = IndexFolder.begin(out, identity)
    if not folder.has(PASSAGES):
        tensors = {"tokens": corpus.tokens_NT.int(), "targets": corpus.targets_NT.int()}
        folder.facts |= {"corpus": dict(corpus.facts)}
        folder.add(PASSAGES, folder.write_tensors(PASSAGES, tensors))
    return folder


def _refuse_differences(identities: list[dict[str, Any]]) -> None:
    """Raise a GramianError if processes have different models, passages or options."""
    for rank, other in enumerate(identities):
        for name, value in identities[0].items():
            if other[name] != value:
                raise GramianError(
                    f"corpus: process {rank} has other {name} than process 0; expected one model and text on all"
                )


def refuse_training_mode(model: nn.Module) -> None:
    """Raise a GramianError for a model in training mode: with dropout, passages and queries would see different models."""
    if any(module.training for module in model.modules()):
        raise GramianError("model: is in training mode; expected model.eval()")


@contextmanager
def counted_parameters(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[None]:
    """Context manager: only parameters whose name matches one of `patterns` require gradients; restored, as `p.grad` is."""
    gradients = {p: p.grad for p in model.parameters()}
    before = {name: p for name, p in named_parameters(model) if p.requires_grad}
    kept = [name for name in before if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not kept:
        raise GramianError(
            f"only: no trained parameter matches {', '.join(patterns)}; expected names such as {next(iter(before), '*')}"
        )
    try:
        for name, p in before.items():
            p.requires_grad_(name in kept)
        yield
    finally:
        for p in before.values():
            p.requires_grad_(True)
        for p, gradient in gradients.items():
            p.grad = gradient


def _factors(
    corpus: PassageCorpus, folder: IndexFolder, options: BuildOptions, report: Progress, shared: SharedWork
) -> KFACNaturalGradient:
    """The factors of an index, fitted to all passages if they are not on disk; damped relative to each block's mean.

    Every process reads them whole from the file, so that what follows needs no other process.
    """
    dtype = next(corpus.model.parameters()).dtype
    if not shared.first(lambda: folder.has(FACTORS)):
        _fit(corpus, folder, options, report, shared)
    with shared.together():
        kfac = options.kfac(dtype)
        kfac.load(str(folder.path / FACTORS), corpus.model)
        folder.facts["damping"] = set_relative_damping(kfac, options.damping)
    return kfac


def _fit(
    corpus: PassageCorpus, folder: IndexFolder, options: BuildOptions, report: Progress, shared: SharedWork
) -> None:
    """Fit the factors to all passages and write them, on the first process."""
    kfac = options.kfac(next(corpus.model.parameters()).dtype, shared.grid)
    starts = range(0, len(corpus), options.batch)[shared.grid.rank :: shared.grid.size]
    batches = [range(first, min(first + options.batch, len(corpus))) for first in starts]
    kfac.fit(
        corpus.model,
        _Again(lambda: (corpus.passages(numbers) for numbers in batches)),
        options.fisher,
        sample_ids=_Again(lambda: (torch.tensor(numbers) for numbers in batches)),
        causal_shift=False,
        progress=lambda stage, done: report(stage, done, len(batches)),
    )
    if kfac.dropped:
        why = kfac.dropped[-1]["reason"]
        raise GramianError(f"passages: {why}; expected targets to predict, and a model whose loss is finite on them")
    saved = kfac.state_dict()  # joins what each process has

    def write() -> dict[str, Any]:
        factor_file.write(saved, str(folder.path / FACTORS))
        folder.add(FACTORS, FileRecord.of(folder.path / FACTORS))
        return folder.facts

    folder.facts = shared.first(write)


class _Again:
    """An iterable that starts anew for every pass."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


# ---- compressed gradients --------------------------------------------------------------------------------------------


def _gradients(
    corpus: PassageCorpus,
    folder: IndexFolder,
    kfac: KFACNaturalGradient,
    options: BuildOptions,
    report: Progress,
    shared: SharedWork,
) -> None:
    """Compress and write the gradients of all shards that are not complete on disk, in rounds of one for each process."""
    names = [shard_name(number) for number in range(-(-len(corpus) // SHARD))]
    with shared.together():
        folder.facts["rank"] = sketch_rank(kfac, options, len(corpus))
    missing = shared.first(lambda: [number for number, name in enumerate(names) if not folder.has(name)])
    if not missing:
        return
    with shared.together():
        sketch = sketch_of(kfac, folder.facts["rank"], options)
    for begin in range(0, len(missing), shared.grid.size):
        numbers, written = missing[begin : begin + shared.grid.size], None
        with shared.together():
            if shared.grid.rank < len(numbers):
                number = numbers[shared.grid.rank]
                count = min(SHARD, len(corpus) - number * SHARD)
                stored = compressed(corpus, sketch, number * SHARD, count, options.batch).bfloat16()
                record = folder.write_tensors(names[number], {"gradients": stored})
                written = [record.bytes, record.sha256]
        for number, found in zip(numbers, shared.all(written), strict=False):
            folder.facts["files"][names[number]] = found
        with shared.together():
            if shared.grid.rank == 0:
                folder.write_facts()
            report("gradients", numbers[-1] + 1, len(names))


def sketch_rank(kfac: KFACNaturalGradient, options: BuildOptions, passages: int) -> int:
    """The largest rank of projections whose compressed gradients, in bfloat16, fit into the bytes of the options."""
    budget = parse_bytes("gradients", options.gradients) or 0
    specs = [block.spec for block in kfac.kfac_factors.values()]
    widest = max(max(spec.outputs, spec.inputs) for spec in specs)

    def nbytes(rank: int) -> int:
        return 2 * passages * sum(k * other for k, other in (rank_of(spec, rank) for spec in specs))

    if nbytes(1) > budget:
        least = format_bytes(nbytes(1))
        raise GramianError(f"gradients: {options.gradients!r} for {passages:,} passages; expected at least {least}")
    low, high = 1, max(isqrt(budget), widest) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle) <= budget else (low, middle)
    return min(low, widest)


def sketch_of(kfac: KFACNaturalGradient, rank: int, options: BuildOptions) -> GradientSketch:
    """The projections of an index's factors."""
    return GradientSketch(kfac.kfac_factors, rank, options.damping, options.seed)


def compressed(corpus: PassageCorpus, sketch: GradientSketch, first: int, count: int, batch: int) -> Tensor:
    """Compressed gradients [count, columns] of `count` passages from number `first` on."""
    matrices, vectors = MatrixGradients(sketch), VectorGradients(sketch)
    with Capture(corpus.model, matrices, vectors, loss_reduction="sum") as seen:
        for _ in passage_losses(corpus, range(first, first + count), batch):
            pass
        parts: list[Tensor] = [part for part in (seen[matrices], seen[vectors]) if part.numel()]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1].to(parts[0])
