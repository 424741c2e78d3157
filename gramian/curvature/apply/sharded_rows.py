"""Multiply a gradient whose rows are sharded over processes (`Shard(0)`, as in FSDP2) by a block, without gathering it.

Legend: Y [r, c] the gradient as its parameter is stored, W processes; R the factor that multiplies Y from the left (along the
sharded rows), C the one from the right: G and A of a linear layer, A and G of a table or of an input-by-output weight.

R^p Y C^p is computed by one factor after the other, on Y split by rows or by columns:

| factor | acts on | entries that leave a process |
|---|---|---|
| C, complete here | rows, each by itself | |
| R, diagonal | rows | |
| R, low rank with its rows sharded | rows | an all-reduce of [T, c]: 2·T·c·(W−1)/W |
| R, complete here | columns | rows to columns and back, two all-to-alls: 2·r·c·(W−1)/W² |
| C, low rank with its rows sharded | columns | the same two, and an all-reduce of [T, r] |

If R's rows are split over processes at other places than Y's, the rows of Y between the two are moved to the process that has
them in R, and back: fewer than W per border. The bias of an input-by-output weight is the last row of Y, on the last process.

Gathering the gradient would send (W−1)·r·c/W, and every process would store and multiply all of it. Where it is gathered
nevertheless, the record states the reason.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from gramian.curvature.blocks.block import Block
from gramian.linalg import Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_columns import ShardedColumns

Act = Callable[[str, Factor, Tensor], Tensor]
"""A function (side, factor, Y [n, k]) → [n, k] that multiplies Y by the side's factor or a power of it."""


@dataclass(frozen=True)
class ShardedRows:
    """The gradient Y [r, c] of a block in the layout of its stored parameter; each process has some of the rows."""

    block: Block
    places: Mapping[str, DTensor]
    """{parameter of the block: its sharded gradient}."""
    exchange: Exchange
    counts: list[int]
    """Number of rows of Y on each process; a bias that is a row of Y (input-by-output weights) is on the last one."""

    @property
    def turned(self) -> bool:
        """True if the rows of the stored parameter are inputs (a table, an input-by-output weight) and not outputs."""
        return self.block.spec.layout in ("in_out", "table")

    @property
    def side(self) -> str:
        """The side, "A" or "G", whose factor multiplies the gradient along its sharded rows."""
        return "A" if self.turned else "G"

    @property
    def _bias_below(self) -> bool:
        """True if the bias is the last row of the gradient matrix, as for an input-by-output weight."""
        return self.turned and self.block.spec.has_bias

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """This process's rows of Y in `dtype`, with the bias as last column or last row; missing parameters are zero.

        Collective if the bias is a row.
        """
        spec, like = self.block.spec, next(iter(self.places.values()))
        width = spec.inputs if not self.turned else spec.outputs
        y = torch.zeros(self.counts[self.exchange.rank], width, dtype=dtype, device=like.device)
        for name, t in self.places.items():
            local = t.to_local().detach().to(dtype)
            if spec.layout == "vector":
                y[:, 0] = local.reshape(-1)
            elif name == spec.parameters[0]:
                y[: len(local), : width - (spec.has_bias and not self.turned)] = local.flatten(1)
            elif self._bias_below:
                bias = self.exchange.gather_rows(local, _rows(width, self.exchange.size))
                if self._last:
                    y[-1] = bias
            else:
                y[:, -1] = local
        return y

    def tensors(self, y: Tensor) -> dict[str, Tensor]:
        """{parameter: DTensor sharded as its gradient} from this process's rows `y`. Collective where the bias is a row."""
        spec, like = self.block.spec, next(iter(self.places.values()))
        found: dict[str, Tensor] = {}
        for name, shape, part in zip(spec.parameters, spec.shapes, self._parts(y), strict=True):
            place = self.places.get(name, like)
            rows = _rows(shape[0], self.exchange.size)[self.exchange.rank]
            local = part.reshape(rows, *shape[1:]).to(place.dtype).contiguous()
            stride = torch.empty(shape, device="meta").stride()
            found[name] = DTensor.from_local(
                local, place.device_mesh, place.placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
        return found

    def _parts(self, y: Tensor) -> list[Tensor]:
        """[weight] or [weight, bias] of this process, from its rows `y` of the gradient matrix."""
        if not self.block.spec.has_bias:
            return [y]
        if not self._bias_below:
            return [y[:, :-1], y[:, -1].clone()]  # a view would hold all of Y
        bias = self.exchange.broadcast(y[-1] if self._last else None, y.shape[1:], y, self.exchange.size - 1)
        mine = bias.split(_rows(len(bias), self.exchange.size))[self.exchange.rank]
        return [y[:-1] if self._last else y, mine]

    @property
    def _last(self) -> bool:
        return self.exchange.rank == self.exchange.size - 1

    # ---- both sides --------------------------------------------------------------------------------------------------

    def apply(self, y: Tensor, act: Act) -> Tensor:
        """This process's rows of R^p Y C^p from its rows `y` of Y; `act` multiplies by the power of one side. Collective."""
        other = "G" if self.side == "A" else "A"
        row_side, column_side = self.block.factors[self.side], self.block.factors.get(other)
        in_columns = []
        if isinstance(row_side, Diagonal):
            one = torch.ones(row_side.dim, 1, dtype=y.dtype, device=y.device)
            y = act(self.side, row_side, one)[self._part].to(y) * y
        elif _is_sharded(row_side):
            y = self._as_cut(row_side, y, lambda z: act(self.side, local(row_side), z))
        else:
            in_columns.append((self.side, row_side))
        if column_side is not None and _is_sharded(column_side):
            in_columns.append((other, column_side))
        elif column_side is not None and len(y):
            y = act(other, column_side, y.mT).mT
        return self._by_columns(y, in_columns, act) if in_columns else y

    def _by_columns(self, y: Tensor, sides: list[tuple[str, Factor]], act: Act) -> Tensor:
        """Multiply complete columns of the sharded gradient by the factors `sides`; one all-to-all before, and one after it."""
        widths = [part.stop - part.start for part in self.exchange.features(y.shape[1])]
        z = self.exchange.reshard(y, self.counts)
        for side, factor in sides:
            if _is_sharded(factor):
                z = act(side, local(factor), z.mT).mT
            elif z.shape[1]:
                z = act(side, factor, z)
        return self.exchange.to_samples(z.contiguous(), 1, widths, self.counts)

    def joint(self, y: Tensor, p: float, first_jitter: float) -> Tensor:
        """This process's rows of (G ⊗ A + λI)^p Y for a G with sharded rows and an A that every process has. Collective.

        `first_jitter`: first Cholesky jitter, relative to the mean diagonal.
        """
        damping = self.block.damping
        assert damping is not None
        block = replace(self.block, G=local(self.block.G))
        return self._as_cut(self.block.G, y, lambda z: block.power(z, p, damping, first_jitter))

    def _as_cut(self, factor: Factor, y: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        """Move rows `y` to the processes that have the same rows of `factor`, call `act` on them, and move the result back."""
        widths = [part.stop - part.start for part in self.exchange.features(factor.dim)]
        return self.exchange.redistribute_rows(
            act(self.exchange.redistribute_rows(y, self.counts, widths)), widths, self.counts
        )

    @property
    def _part(self) -> slice:
        start = sum(self.counts[: self.exchange.rank])
        return slice(start, start + self.counts[self.exchange.rank])


def rows_of(
    block: Block, places: Mapping[str, Tensor], power: float | None, exchange: Exchange | None
) -> tuple[ShardedRows | None, str]:
    """(`ShardedRows` of a block's gradient, "") if it can be multiplied without gathering; else (None, reason).

    The reason is "" if the gradient `places` {parameter: tensor} is not sharded. `power` None: the undamped block. The result
    is the same on all processes: it follows from shapes, placements, representations of factors and damping.
    """
    sharded = {name: t for name, t in places.items() if isinstance(t, DTensor)}
    if not sharded:
        return None, ""
    spec = block.spec
    if len(sharded) < len(places) or any(t.placements != (Shard(0),) for t in sharded.values()):
        return None, "it is not sharded by rows over one mesh dimension"
    if exchange is None or any(_ranks(t.device_mesh.get_group()) != _ranks(exchange.group) for t in sharded.values()):
        return None, "its factors were not joined by the processes that share it"
    if any(tuple(t.shape) != spec.shapes[spec.parameters.index(name)] for name, t in sharded.items()):
        return None, "its shape is not that of the capture"
    if block.correction is not None:
        return None, "EK-FAC's eigenvalues need both sides' eigenvectors at once"
    if spec.kind == "block":
        return None, "an exact block is applied whole"
    if spec.by_rows and spec.shapes[0][0] != spec.inputs:
        return None, "its rows are not those of its first axis"
    each = torch.Size(spec.shapes[0][1:]).numel() if spec.layout == "vector" else 1
    counts = [rows * each for rows in _rows(spec.shapes[0][0], exchange.size)]
    counts[-1] += spec.has_bias and spec.layout == "in_out"
    return _fitting(ShardedRows(block, sharded, exchange, counts), power)


def _fitting(rows: ShardedRows, power: float | None) -> tuple[ShardedRows | None, str]:
    block, exchange, damping = rows.block, rows.exchange, rows.block.damping
    assert damping is not None
    for side, factor in block.factors.items():
        if not _is_sharded(factor):
            continue
        assert isinstance(factor, LowRank | DiagonalLowRank) and isinstance(factor.columns, ShardedColumns)
        if _ranks(factor.columns.others.group) != _ranks(exchange.group):
            return None, f"{side} is sharded over other processes"
        value = damping.lambda_A if side == "A" else damping.lambda_G
        clipped = power is not None and not factor.clips_nothing(value, damping.max_condition)
        if isinstance(factor, DiagonalLowRank) and clipped:
            return None, f"{side} is written out for its clip"
    if power is not None and damping.joint and block.A is not None:
        fits = not rows.turned and _is_sharded(block.G) and isinstance(block.G, LowRank) and not _is_sharded(block.A)
        return (rows, "") if fits else (None, "joint damping needs both sides' eigenvectors at once")
    return rows, ""


def local(factor: Factor) -> Factor:
    """A copy of a factor with sharded rows that multiplies this process's rows of Y only, on the same memory."""
    assert isinstance(factor, LowRank | DiagonalLowRank) and isinstance(factor.columns, ShardedColumns)
    factor.bound()
    twin = copy.copy(factor)
    twin.columns = factor.columns.local()
    if isinstance(twin, DiagonalLowRank):
        twin.values_N = twin.values_N[factor.columns.part]
    return twin


def _is_sharded(factor: Factor) -> bool:
    return isinstance(factor, LowRank | DiagonalLowRank) and factor.columns.others is not None


def _rows(n: int, size: int) -> list[int]:
    """Numbers of rows per process when `Shard(0)` cuts n rows into `size` parts."""
    return [int(Shard.local_shard_size_and_offset(n, size, rank)[0]) for rank in range(size)]


def _ranks(group: object) -> list[int]:
    return dist.get_process_group_ranks(group)  # type: ignore[arg-type]
