"""Sort the differentiable outputs of a model by kind: outputs of one kind are proven together or each by itself.

Outputs with rows of samples are proven together, every single number (a returned loss) by itself. A backward through an output
that is not proven raises GramianError.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from gramian.taps.proof.model_outputs import rows_of
from gramian.taps.proof.proof_runs import ProofRuns, Refuted
from gramian.taps.proof.sample_arguments import SampleArguments


@dataclass
class OutputKinds:
    """Indices of the differentiable outputs of each kind: with rows of samples, in attributes, single numbers, and others.

    `choose_rows` fills the lists.
    """

    samples: SampleArguments
    runs: ProofRuns
    rows: list[int] = field(default_factory=list)
    attributes: list[int] = field(default_factory=list)
    """Indices of tensors with rows of samples that the forward stored in attributes of modules; a loss may ignore them."""
    scalars: list[int] = field(default_factory=list)
    odd: dict[int, str] = field(default_factory=dict)
    """{index of an output of any other shape: its name and shape, as text for an error}."""

    def choose_all(self, outputs: list[Tensor], but: Collection[int] = ()) -> list[int]:
        """Sort the outputs by kind and return the indices of those with rows or a single number, except those in `but`."""
        self.choose_rows(outputs)
        return [i for i in (*self.rows, *self.attributes, *self.scalars) if i not in but]

    def choose_one(self, number: int, outputs: list[Tensor]) -> list[int]:
        """Sort the outputs by kind and return the index `number`; raises Refuted if that output has another shape."""
        if number not in self.choose_all(outputs):
            raise Refuted(self.odd.get(number, f"output {number} of the model is not differentiable"))
        return [number]

    def choose_rows(self, outputs: list[Tensor]) -> list[int]:
        """Sort the outputs by kind; returns the indices of those with rows of samples; if none, of the first single number."""
        differentiable = [i for i, y in enumerate(outputs) if y.requires_grad]
        with_rows = [i for i in differentiable if rows_of(outputs[i], self.samples)]
        self.rows = [i for i in with_rows if i < self.runs.returned]
        self.attributes = [i for i in with_rows if i not in self.rows]
        self.scalars = [i for i in differentiable if outputs[i].numel() == 1 and i not in with_rows]
        batch, units = self.samples.batch, self.samples.units
        wanted = f"first axis is not the batch of {batch}"
        if units is not None and units.ids.dim() == 2:
            wanted = f"first axes are not the tokens {list(units.ids.shape)} of the units"
        self.odd = {
            i: f"{self.runs.titles[i]} has the shape {list(outputs[i].shape)}, whose {wanted}"
            for i in differentiable
            if i not in with_rows and i not in self.scalars
        }
        return self.rows or self.scalars[:1]

    def couples(self, number: int, failure: Exception) -> str:
        """Error text: output `number` mixes samples, as `failure` shows; with a remedy if uncounted tokens may be why."""
        reason = f"{self.runs.titles[number]} couples samples ({failure})"
        if not counts_differ(self.samples):
            return reason
        return (
            f"{reason}; some samples have more tokens that do not count (−100, or 0 in a mask) than others, and a mean over "
            "the tokens of the batch then depends on all of them: pass a constant num_items_in_batch=N with "
            "loss_reduction=1/N, or take the mean of each sample's own loss"
        )


def counts_differ(samples: SampleArguments) -> bool:
    """True if some argument has −100 in it (an ignored label), or samples have different numbers of zeros in a mask."""
    return any(kind != "values" for _, kind in samples.uneven())
