"""The report of a process on its sums of a refresh, from which all processes choose the same way to join them.

The input is the sums of one process; the output is a JSON-able dict with shapes, token counts, weights and dtypes of every
side. `Exchange.gather_messages` sends it to all ranks; collectives depend on the reports of all ranks only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.curvature.estimate.kronecker_sums import BlockSums
from gramian.curvature.estimate.token_moments import TokenMoment, same_sums

ROLES = ("inputs", "gradients", "probabilities", "deviations", "table_gradients")
"""Names of the sums of a block, attributes of `BlockSums`."""


class RankReport(NamedTuple):
    """Facts on one sum of a block (such as that of its inputs) on one process, as plain values that are sent in this order."""

    width: int
    seen: int
    stored: int
    """Number of tokens in the sum, after any subset was taken."""
    weight: float
    """Sum of the weights w of the tokens in the sum."""
    weighted: bool
    keep: tuple[int, int | None, bool, str]
    dtype: str
    """Name of the dtype of the sum, or of its rows once they are converted to float32 or float64."""
    plain: tuple[str, float] | None
    """(dtype name, factor still to multiply) of rows that can be sent unchanged; None: they have weights or several parts."""
    group: int
    """Position (in the order of blocks) of the first block on this process that has the same inputs."""


def sums_report(kronecker: Mapping[str, BlockSums], remainder: Mapping[str, Tensor]) -> dict[str, Any]:
    """A JSON-able report on this process's sums of K-FAC blocks and of other parameters. One device synchronisation.

    "sides": the `RankReport` values of each block and role, None without a sum; "tables": {block: [dtype, Σ weights]} of
    embedding lookups; "remainder": {parameter: dtype}.
    """
    slots = [(name, getattr(block, role)) for name, block in kronecker.items() for role in ROLES]
    moments = [moment for _, moment in slots if moment is not None]
    tables = {name: block for name, block in kronecker.items() if block.counts_V is not None}
    numbers = [moment.stored_weight() for moment in moments] + [block.table_weight for block in tables.values()]
    fetched = _fetch(numbers)
    weights = {id(moment): weight for moment, weight in zip(moments, fetched, strict=False)}
    groups = _input_groups(kronecker)
    return {
        "sides": [
            None if moment is None else _side_report(moment, weights[id(moment)], groups.get(name, 0))
            for name, moment in slots
        ],
        "tables": {
            name: [_dtype_name(block.counts_V.dtype), weight]
            for (name, block), weight in zip(tables.items(), fetched[len(moments) :], strict=True)
            if block.counts_V is not None
        },
        "remainder": {name: _dtype_name(total.dtype) for name, total in remainder.items()},
    }


def read_side(values: Sequence[Any]) -> RankReport:
    """The `RankReport` in a received list of values, with tuples where JSON has lists."""
    plain: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return RankReport(*plain)


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype with this name, such as "float32"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _side_report(moment: TokenMoment, weight: float, group: int) -> RankReport:
    total = moment.matrix if moment.matrix is not None else moment.diagonal_N
    plain = None
    if total is None:
        one = len(moment.chunks) == 1 and moment.chunks[0].weights_T is None
        scale = moment.chunks[0].scale if moment.chunks else None
        if one and isinstance(scale, float):
            plain = (_dtype_name(moment.chunks[0].rows_TN.dtype), scale)
        dtypes = [wide_dtype(chunk.rows_TN) for chunk in moment.chunks] or [torch.float32]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    else:
        dtype = total.dtype
    keep = moment.keep
    return RankReport(
        width=moment.width,
        seen=moment.seen,
        stored=moment.stored,
        weight=weight,
        weighted=any(chunk.weights_T is not None for chunk in moment.chunks),
        keep=(keep.rows_up_to, keep.limit, keep.diagonal, keep.why),
        dtype=_dtype_name(dtype),
        plain=plain,
        group=group,
    )


def _input_groups(kronecker: Mapping[str, BlockSums]) -> dict[str, int]:
    """{block: position of the first block whose inputs are the same tensors}."""
    firsts: dict[int, list[tuple[int, TokenMoment]]] = {}
    found: dict[str, int] = {}
    for number, (name, block) in enumerate(kronecker.items()):
        if block.inputs is not None:
            inputs = block.inputs
            tensor = inputs.matrix if inputs.matrix is not None or not inputs.chunks else inputs.chunks[0].rows_TN
            alike = firsts.setdefault(0 if tensor is None else tensor.data_ptr(), [])  # equal sums have equal addresses
            found[name] = next((i for i, moment in alike if same_sums(inputs, moment)), number)
            if found[name] == number:
                alike.append((number, inputs))
    return found


def _fetch(values: Sequence[float | Tensor]) -> list[float]:
    """The values as floats; those on a device are fetched all at once."""
    waiting = [value.double() for value in values if isinstance(value, Tensor)]
    fetched = iter(torch.stack([value.to(waiting[0].device) for value in waiting]).tolist() if waiting else [])
    return [next(fetched) if isinstance(value, Tensor) else float(value) for value in values]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
