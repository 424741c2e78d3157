"""The differentiable outputs of a model by kind, which decides what is proven together.

Outputs with rows of samples are proven together, every single number (a returned loss) by itself. No backward may go through
an output that is not proven.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from gramian.taps.proof.model_outputs import rows_of
from gramian.taps.proof.proof_runs import ProofRuns
from gramian.taps.proof.sample_arguments import SampleArguments


@dataclass
class OutputKinds:
    """Numbers of the outputs of each kind, set by `choose_rows` on the outputs of the untapped run."""

    samples: SampleArguments
    runs: ProofRuns
    rows: list[int] = field(default_factory=list)
    attributes: list[int] = field(default_factory=list)
    """Rows of samples that the model does not return but leaves in attributes; a loss may ignore them."""
    scalars: list[int] = field(default_factory=list)
    odd: dict[int, str] = field(default_factory=dict)
    """{output of any other shape: which one it is, and its shape}."""

    def choose_all(self, outputs: list[Tensor], but: Collection[int] = ()) -> list[int]:
        """All outputs that can have a cotangent, except those in `but`."""
        self.choose_rows(outputs)
        return [i for i in (*self.rows, *self.attributes, *self.scalars) if i not in but]

    def choose_rows(self, outputs: list[Tensor]) -> list[int]:
        """Outputs with rows of samples, which are proven together; where there is none, the first single number."""
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
        """The reason why an output is not proven, with the remedy for a mean over tokens."""
        reason = f"{self.runs.titles[number]} couples samples ({failure})"
        if not counts_differ(self.samples):
            return reason
        return (
            f"{reason}; some samples have more tokens that do not count (−100, or 0 in a mask) than others, and a mean over "
            "the tokens of the batch then depends on all of them: pass a constant num_items_in_batch=N with "
            "loss_reduction=1/N, or take the mean of each sample's own loss"
        )


def counts_differ(samples: SampleArguments) -> bool:
    """True if samples differ in how many of their tokens count."""
    return any(kind != "values" for _, kind in samples.uneven())
