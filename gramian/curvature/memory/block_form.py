"""All that the bytes of a block depend on except its tokens: widths, dtypes, and the options that change its factors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.options import Options

MANY = 2**62
"""A token count that stands for any number of tokens."""


class BlockTokens(NamedTuple):
    """Numbers of tokens of a block in a refresh, over all processes."""

    inputs: int
    """Number of tokens that A is summed over."""
    outputs: int
    """Number of tokens that G is summed over: as for A, or more for an exact head whose inputs are averaged per sample."""
    table: int
    """Number of tokens that look the weight up in a table."""
    calls: int = 1
    """Number of calls with the weight in a forward; a subset keeps or drops the tokens of one position in all calls together.
    """
    lookups: int = 1
    """Number of calls in a forward that look rows of the weight up in a table."""

    @property
    def unlimited(self) -> bool:
        """True if the counts stand for any number of tokens."""
        return self.outputs >= MANY


ANY_TOKENS = BlockTokens(MANY, MANY, MANY)


@dataclass(frozen=True)
class BlockForm:
    """All that the bytes of a block depend on except its tokens: widths, dtypes and options. Equal forms take equal bytes."""

    kind: str
    """`Spec.kind` of the block: "kronecker", "block" or "diagonal"."""
    rows: int
    """`Spec.rows` of the block, the number of its exact blocks."""
    inputs: int
    """m, the width of the factor A, the bias included."""
    outputs: int
    """o, the width of the factor G."""
    bias: bool
    linear: bool
    """True if some layer multiplies its inputs by the weight."""
    table: bool
    """True if some layer looks rows of the weight up by index (an embedding)."""
    transposed: bool
    """True if the rows of the table are the outputs of the block, as for an embedding table tied to a head."""
    exact: bool
    """True if G is the exact Fisher of a softmax head."""
    shared: bool
    """True if A is stored by another block with the same inputs."""
    activation: int
    """Bytes of one number in activations (inputs and output gradients)."""
    wide: int
    """Bytes of a number in sums: 4 (float32), or 8 where activations are float64."""
    storage: torch.dtype
    """Dtype in which the block's factors are stored."""
    algebra: int
    """Bytes of a number in the small matrices that are factorised."""
    averaged: int
    """Largest number of columns of a low-rank average over refreshes; 0: factors are not averaged."""
    decomposed: bool
    """True if powers of factors are computed from eigenvectors rather than from Cholesky factors."""
    processes: int = 1
    """Number of processes that share the tokens."""
    reduction: str = ""
    """How processes join their low-rank sides: "gram", "gather" or "dense" (see `kfac_distributed_reduce`); "": one process."""
    corrected: bool = False
    """True if the option `ekfac` is on: eigenvalues are measured from per-sample gradients."""
    streamed: bool = False
    """True if they are measured in a second pass, so that no token is stored for them."""
    budgeted: bool = False
    """True if there is a memory budget: samples are then projected in smaller pieces."""
    operators: str = ""
    """Operators that an optimizer keeps for its steps: "inverse", "root" or "unused" (`operator_footprint`); "": none."""
    on_gpu: bool = False
    """True if the layer runs on a GPU."""
    weight: int = 4
    """Bytes of one number of the weight."""

    @classmethod
    def of(
        cls,
        spec: Spec,
        options: Options,
        exact: bool,
        shared: bool = False,
        powers: bool = False,
        activation: torch.dtype | None = None,
        algebra: torch.dtype = torch.float64,
        processes: int = 1,
        streamed: bool = False,
        operators: str = "",
        on_gpu: bool = False,
    ) -> "BlockForm":
        """The form of a block under the options. `activation`: dtype under autocast; None: that of the parameters.

        `exact`: G is the exact softmax Fisher; `shared`: another block stores its A; `powers`: exponents other than -1 will be
        used, which need eigenvectors; `algebra`: dtype of the matrices that are factorised; `streamed`: EK-FAC in two passes;
        `operators`: those that an optimizer keeps. A memory budget, and joint damping of a Kronecker product, leave none.
        """
        without = options.budget is not None or (options.damps_product and spec.kind == "kronecker")
        activation = spec.dtype if activation is None or spec.dtype == torch.float64 else activation
        wide = 8 if activation == torch.float64 else 4
        linear = len(spec.tables) < len(spec.layers)
        return cls(
            kind=spec.kind,
            rows=spec.rows,
            inputs=spec.inputs,
            outputs=spec.outputs,
            bias=spec.has_bias,
            linear=linear,
            table=bool(spec.tables),
            transposed=bool(spec.tables) and spec.layout != "table",
            exact=exact and linear,
            shared=shared,
            activation=wide if options.weight_sharing == "reduce" else activation.itemsize,
            wide=wide,
            storage=options.storage_dtype(spec.dtype),
            algebra=8 if spec.dtype == torch.float64 else algebra.itemsize,
            averaged=options.kfac_auto_t_max if options.ema_decay else 0,
            decomposed=powers or options.damps_product,
            processes=processes,
            reduction=options.kfac_distributed_reduce if processes > 1 else "",
            corrected=options.ekfac,
            streamed=options.ekfac and streamed,
            budgeted=options.budget is not None,
            operators="" if operators == "inverse" and without else operators,
            on_gpu=on_gpu,
            weight=spec.dtype.itemsize,
        )

    @property
    def widths(self) -> tuple[int, int, int]:
        """(width of A, width of G, width of an embedding table's output gradients)."""
        return self.inputs, self.outputs, self.inputs if self.transposed else self.outputs

    @property
    def row_processes(self) -> int:
        """Number of processes over which the rows of a low-rank factor are sharded."""
        return self.processes if self.reduction == "gram" else 1

    def local(self, tokens: int) -> int:
        """Number of tokens of one process, if all processes together have `tokens`; rounded up."""
        return -(-tokens // self.processes)
