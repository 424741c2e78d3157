"""The cost of a row proof, the check that each row of a layer's tensors depends on one sample only: runs and memory.

B is the number of samples and N that of tokens of a backward. The largest input or output gradient has N·D entries of w bytes.

| part | where | bytes |
|---|---|---|
| fingerprint of one tensor, while it is computed | device | min(N·D, 2²⁴) · (w + 16) |
| or gradient of one sample for one parameter of P entries, while it is computed | device | 3·P·w |
| copies of tokens and targets | device | 16·N |
| fingerprints of every tensor, of three runs | host | 3 · 40·B · tensors |

Of the first two parts the larger one counts. The plan of a training step already counts the gradient of all weights, which the
first part of a proof stores, and the activations of a forward.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gramian.plan.transformer_memory import Needs

BLOCK = 2**24
"""Number of tensor entries that are converted to float64 at a time for fingerprints."""
FINGERPRINT = 40
"""Bytes of the fingerprint of one row: a hash of 64 bits and four projections in float64."""
WORKING = 16
"""Extra bytes per entry while a fingerprint is made: its bits as an integer, and its value in float64."""
COMPARED = 3
"""Number of runs whose fingerprints are stored at a time: the batch, the same batch again, and a changed one."""


@dataclass(frozen=True)
class ProofPlan:
    """Model runs and memory of a row proof, the check that each row of a layer's tensors depends on one sample only."""

    runs: int
    """Number of forwards and backwards, for each set of model outputs that is proven separately."""
    device: int
    """Bytes on the device on top of a training step."""
    host: int
    """Bytes of row fingerprints in host memory."""


def proof_runs(samples: int) -> int:
    """Number of forwards and backwards of a row proof of B = `samples` samples: 2⌈log₂ B⌉ + 4; 0 for a single sample."""
    return 2 * (samples - 1).bit_length() + 4 if samples > 1 else 0


def plan_proof(needs: "Needs", windows: int) -> ProofPlan:
    """Runs and bytes of the row proof of a transformer on `windows` windows (token sequences, one sample each).

    A single window needs no proof. The model's buffers are not counted.
    """
    shape, runs = needs.shape, proof_runs(windows)
    if not runs:
        return ProofPlan(0, 0, 0)
    tokens = windows * needs.length
    entries = tokens * max(shape.hidden, shape.vocabulary, shape.queries + 2 * shape.keys)
    largest = max(map(prod, shape.parameter_shapes), default=shape.vocabulary * shape.width)
    making = max(min(entries, BLOCK) * (needs.stored + WORKING), 3 * largest * needs.stored)
    tensors = 2 * len(shape.parameter_shapes)  # at most: an input and an output gradient for each parameter
    return ProofPlan(runs, making + 16 * tokens, COMPARED * FINGERPRINT * windows * tensors)
