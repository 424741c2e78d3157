"""What a proof assumes of a model's layers, and what it assumes next, each time it fails.

By default every layer sees rows of samples on axis 0. Where the proof fails, these are tried in this order:

1. samples lie elsewhere than on axis 0 of some layers (`sample_axes`);
2. a weight that its layer's tap does not explain is used by the layer around it, which is then tapped as one (`whole_layers`);
3. some calls return no batch axis, and get a copy for each sample (`batch_free`), first without those that return one row;
4. the layer around one that is refused is tapped as one, and all begins again.

Nothing of this is trusted: each time the batch is proven from the beginning.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from gramian.core.errors import GramianError
from gramian.taps.model.whole_layers import restore, take_whole, whole_classes
from gramian.taps.proof.isolated_runs import undisturbed
from gramian.taps.proof.proof_runs import Execute, ProofRuns
from gramian.taps.proof.prover import Prover
from gramian.taps.proof.remedies.sample_axes import SampleAxes
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.tapped_model import Layouts, TappedModel

Assumed = tuple[dict[str, frozenset[int] | None], frozenset[type[nn.Module]], Layouts]
"""Calls without a batch axis, classes of layers that are tapped as one, and where samples lie."""


@dataclass
class LayerAssumptions:
    """What is assumed of the layers of a model while one batch is proven; it is stored in the model itself."""

    model: TappedModel
    execute: Execute
    samples: SampleArguments
    seed: Callable[[], int]
    reasons: dict[type, str] = field(default_factory=dict)
    """{class of layers that are tapped as one: why}, as the log has it."""
    failure: Exception | None = None
    """Why the last attempt failed, for all outputs or for some that have rows of samples; None: it did not."""

    @property
    def present(self) -> Assumed:
        """What is assumed now."""
        return self.model.batch_free, whole_classes(self.model.root_module), self.model.layouts

    def assume(self, assumed: Assumed) -> None:
        """Assume what `present` has returned before."""
        self.model.batch_free, whole, self.model.layouts = assumed
        if whole_classes(self.model.root_module) != whole:
            restore(self.model.root_module, whole)
            self.model.retap()

    def begin(self) -> None:
        """Look for the axes of samples at once if a module says that they are not the first (batch_first=False)."""
        root = self.model.root_module
        if not self.model.layouts and any(getattr(one, "batch_first", True) is False for one in root.modules()):
            self.model.layouts = self.layouts()

    def look(self, refusal: GramianError) -> None:
        """Look for the axes of samples after a tap has refused a layer; raises the refusal if none lie elsewhere."""
        self.model.layouts = self.layouts() if self.model.tells_samples_apart else {}
        if not self.model.layouts:
            raise refusal

    def remedies(self, sums_only: bool) -> Iterator[bool]:
        """Assume something else for each attempt that failed; True each time, when the proof is to be repeated.

        `sums_only`: the proof does not tell samples apart; their axes are looked for once, and again in layers tapped anew.
        """
        model, free = self.model, self.model.batch_free
        if free:  # it may be that of another structure
            free = model.batch_free = {}
            yield True
        while True:
            known, refused = model.layouts, self.failure
            model.layouts = known if sums_only else self.layouts()
            if model.layouts != known:
                yield True
            if getattr(self.failure, "parameter", "") and self._take_whole(sums_only):
                yield True
                continue
            for ones in (False, True):
                if ones and getattr(self.failure, "__cause__", None) is None:
                    continue  # only if the user's code failed where one row became a row for each sample
                without = self.batch_free(ones)
                if without and without != model.batch_free:
                    model.batch_free = free | without
                    yield True
            if not getattr(self.failure, "layer", ""):
                self.failure = refused  # what failed with copies names none
            if not self._take_whole(sums_only):
                return
            model.batch_free = free
            yield True

    def layouts(self, brief: bool = False) -> Layouts:
        """Where the samples lie in the calls of layers that have them elsewhere than on axis 0; 2⌈log₂ B⌉ + 1 runs.

        `brief`: two runs, or one, where these show that no layer can have them elsewhere.
        {} if it fails in one of them, is tensor parallel, or all samples are equal. A layer of products whose calls differ
        goes on with its fallback.
        """
        model, samples = self.model, replace(self.samples, units=None)
        if model.tensor_parallel is not None:  # a part of an output has no fingerprint, and others wait if it fails
            return {}
        axes = SampleAxes(samples.batch, 0)
        with undisturbed(model.root_module, samples.leaves):
            prover = Prover(model, self.execute, samples, seed=self.seed())
            try:
                model.watcher = axes
                prover.watched(axes, brief)
            except Exception:  # the user's code may not run so, which the proof itself reports
                return {}
            finally:
                model.watcher = None
        found = axes.found()
        for tap in model.taps:
            products = tap.products
            if products is not None and len(set(found.get(tap.name, ()))) > 1:
                tap.products, tap.site = None, products.fallback
        return found

    def batch_free(self, ones: bool = False) -> dict[str, frozenset[int] | None]:
        """{layer: numbers of calls that return as many rows in a forward with one more sample, but not one; None: all}.

        `ones`: calls that return one row count as well, which otherwise stands for all samples. Two forwards;
        {} if one of them fails, or other processes gather weights in every run.
        """
        batch = self.samples.batch
        if self.model.batch_size is not None or not self.model.lockstep.alone:
            return {}
        samples = replace(self.samples, units=None)
        with undisturbed(self.model.root_module, samples.leaves):
            runs = ProofRuns(self.model, self.execute, samples, 0)
            here, there = runs.first_axes(range(batch)), runs.first_axes([*range(batch), 0])
        found: dict[str, frozenset[int] | None] = {}
        for name, sizes in here.items():
            pairs = enumerate(zip(sizes, there.get(name, []), strict=False))
            moved = {number for number, call in enumerate(self.model.layouts.get(name, ())) if call.moved}
            calls = frozenset(
                number
                for number, (size, other) in pairs
                if number not in moved and size == other and (ones or size != 1)
            )
            found |= {name: calls if len(calls) < len(sizes) else None} if calls else {}
        return found

    def refuse_compiled(self) -> None:
        """Raise GramianError if a compiled graph cannot follow samples on other axes than the first. One forward."""
        with undisturbed(self.model.root_module, self.samples.leaves):
            runs = ProofRuns(self.model, self.execute, self.samples, 0)
            sizes = runs.first_axes(range(self.samples.batch))
        for layer, calls in self.model.layouts.items():
            if len(set(calls)) > 1 or 1 in sizes.get(layer, ()):
                raise GramianError(
                    f"{layer}: has its samples on another axis than the first, behind one of size 1 or not in every call, "
                    "which a compiled graph cannot follow; expected eager mode for this model"
                )

    def _take_whole(self, sums_only: bool) -> bool:
        """Tap the next layer around the parameter or layer of the last failure as one; False if none is left or may be taken.

        None may be if a listener needs records of whole layers, or if a process waits for this one.
        """
        model, root = self.model, self.model.root_module
        parameter, layer = (getattr(self.failure, name, "") for name in ("parameter", "layer"))
        if (
            model.takes_layers
            or not model.lockstep.alone
            or model.tensor_parallel is not None
            or not (parameter or layer)
        ):
            return False
        known = whole_classes(root)
        if not take_whole(root, parameter or layer):
            return False
        model.retap()
        if sums_only:  # which say nothing of samples
            model.layouts = self.layouts(brief=True)
        why = f"has a layer inside that is refused by itself ({layer})"
        why = "uses weights of its children without calling them" if parameter else why
        self.reasons |= dict.fromkeys(whole_classes(root) - known, why)
        return True
