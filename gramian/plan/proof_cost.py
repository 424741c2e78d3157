"""The cost of a row proof: how often it runs the model, and its memory on top of a training step.

With B samples and N tokens of a backward, the largest layer input or output gradient of N·D entries of w bytes:

| part | where | bytes |
|---|---|---|
| fingerprint of one tensor, in the making | device | min(N·D, 2²⁴) · (w + 16) |
| or gradient of one sample for one parameter of P entries, in the making | device | 3·P·w |
| copies of tokens and targets | device | 16·N |
| fingerprints of every tensor, of three runs | host | 3 · 40·B · tensors |

A gradient of all weights, which part 1 stores beside them, is in the plan of the step already: no parameter has another one
then. So are the activations of a forward.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gramian.plan.transformer_memory import Needs

BLOCK = 2**24
"""Entries that are widened at a time, as in `gramian.linalg.wide`."""
FINGERPRINT = 40
"""Bytes of a row: a hash of 64 bits and four projections in float64."""
WORKING = 16
"""Bytes of an entry beside a copy of it: its bits as an integer, and the value in float64."""
COMPARED = 3
"""Runs whose fingerprints are there at a time: the batch as it is, the same once more, and another one."""


@dataclass(frozen=True)
class ProofPlan:
    """Runs and memory of the proof of one structure of inputs."""

    runs: int
    """Forwards and backwards, for each set of outputs that is proven by itself."""
    device: int
    """Bytes on top of a step."""
    host: int
    """Bytes of row fingerprints in host memory."""


def proof_runs(samples: int) -> int:
    """2⌈log₂ B⌉ + 4; none where a sample is alone."""
    return 2 * (samples - 1).bit_length() + 4 if samples > 1 else 0


def plan_proof(needs: "Needs", windows: int) -> ProofPlan:
    """The proof of a transformer on so many windows, one sample each; buffers, which are copied too, are not counted."""
    shape, runs = needs.shape, proof_runs(windows)
    if not runs:
        return ProofPlan(0, 0, 0)
    tokens = windows * needs.length
    entries = tokens * max(shape.hidden, shape.vocabulary, shape.queries + 2 * shape.keys)
    largest = max(map(prod, shape.parameter_shapes), default=shape.vocabulary * shape.width)
    making = max(min(entries, BLOCK) * (needs.stored + WORKING), 3 * largest * needs.stored)
    tensors = 2 * len(shape.parameter_shapes)  # at most: an input and an output gradient for each parameter
    return ProofPlan(runs, making + 16 * tokens, COMPARED * FINGERPRINT * windows * tensors)
