"""Checks between a model and its factors, and between the processes that share them.

`agree` turns the reports of all processes on their part of a refresh into the totals of the refresh.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import LAYOUTS, Spec
from gramian.parallel.data_parallel import reshard
from gramian.parallel.model_grid import grid_of
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.hub import hub_of
from gramian.taps.model.user_names import named_parameters, unwrap
from gramian.taps.model.whole_layers import take_known
from gramian.taps.products.replay import BOTH_WAYS, CONTRADICTIONS, OTHERWISE


def check_spec(before: Spec, now: Spec) -> None:
    """Raise a GramianError if a block is not as at the capture: its bias, kind, parameters or shapes have changed."""
    if before.kind == now.kind and before.parameters == now.parameters and before.shapes == now.shapes:
        return
    if before.has_bias != now.has_bias:
        what = "had a trained bias and has none now" if before.has_bias else "had no trained bias and has one now"
        raise GramianError(f"{before.name}: {what}; expected its bias as at the capture, or a new object")
    raise GramianError(
        f"{before.name}: was {before.kind} of {_shapes(before)} and is {now.kind} of {_shapes(now)}; "
        "expected the layer as at the capture"
    )


def _shapes(spec: Spec) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in zip(spec.parameters, spec.shapes, strict=True))


def module_of(model: Any) -> nn.Module:
    """The user's `nn.Module` without wrappers such as DDP; a GramianError for anything that is not a module."""
    if not isinstance(model, nn.Module):
        raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
    return unwrap(model)


def refuse_open_capture(root: nn.Module) -> None:
    """Raise a GramianError if a capture is open on the model `root`: it would record passes that are not meant for it."""
    if hub_of(root).live:
        raise GramianError(
            "model: is inside an open capture, which would take these passes for its own; expected a call outside of it"
        )


def check_number(name: str, value: Any, sign: Literal["any", "positive", "not negative"] = "any") -> None:
    """Raise a GramianError unless `value`, the argument `name`, is a finite int or float with this sign."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise GramianError(f"{name}: expected a finite number, got {value!r}")
    if sign == "positive" and not value > 0:
        raise GramianError(f"{name}: expected a number above 0, got {value!r}")
    if sign == "not negative" and value < 0:
        raise GramianError(f"{name}: expected a number of 0 or more, got {value!r}")


def check_vector(name: str, vector: Any) -> None:
    """Raise a GramianError unless `vector`, the argument `name`, is a mapping {parameter: floating-point tensor}."""
    if not isinstance(vector, Mapping):
        raise GramianError(f"{name}: expected a mapping from parameter names to tensors, got {type(vector).__name__}")
    for key, value in vector.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise GramianError(f"{name}: {key}: expected a floating-point tensor, got {got}")


def has_factors(layer: str, specs: Mapping[str, Spec]) -> bool:
    """True if the layer of this name multiplies by the matrix of a K-FAC block of `specs`, or looks its rows up."""
    return any(spec.kind == "kronecker" and layer in spec.layers and not spec.by_rows for spec in specs.values())


def tap_as(root: nn.Module, specs: Iterable[Spec]) -> bool:
    """Tap layers as one that were so when blocks with these `specs` were captured; True if some were not known to be."""
    found = take_known(root, [(layer, name) for spec in specs for layer in spec.layers for name in spec.owners])
    if found and hub_of(root).live:
        hub_of(root).retap()
    return found


def unique_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of every parameter of a model; a tied one is listed once, under its first name."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, p in named_parameters(root):
        first.setdefault(id(p), (name, p))
    return list(first.values())


# ---- processes -----------------------------------------------------------------------------------------------------


def group_of(model: nn.Module, root: nn.Module, given: Any) -> Any:
    """The process group that shares a model's data: `given`, else that of DDP or FSDP2; None: the default group.

    `root` is the model without its wrapper. For a tensor-parallel model it is `given` or the default group; a GramianError is
    raised if the default group is larger than the model's mesh (FSDP2's dimension included), or for other kinds of sharding.
    """
    reshard(root)
    if TensorParallel.of(root) is None:
        wrapped = grid_of(model, root)
        for name, p in root.named_parameters():
            if isinstance(p, DTensor) and p.device_mesh.ndim > 1:
                raise GramianError(
                    f"module: {name} is placed as {p.placements}; expected fully_shard over one mesh dimension"
                )
        return wrapped.group if given is None else given
    meshes = [p.device_mesh for p in root.parameters() if isinstance(p, DTensor) and p.device_mesh.ndim > 1]
    if given is None and meshes and meshes[0].size() != world_size(None):
        raise GramianError(
            f"process_group: the model's mesh has {meshes[0].size()} of {world_size(None)} processes; expected the group of "
            "all processes of the mesh"
        )
    return given


def world_size(group: Any) -> int:
    """The number of processes of a group; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True)
class Agreed:
    """The totals of a refresh over all processes: loss terms, samples, passes, head and padding."""

    terms: float
    samples: int
    passes: int
    head: str | None
    padded: dict[str, tuple[int, float]]
    problem: str
    """Why the refresh is rejected, as a text; "" if it is not."""
    free: int | None
    """Free bytes of GPU memory on the process with the fewest; None: no process uses a GPU."""
    observed: dict[str, str]
    """{parameter of an assumed form: the layout that processes have seen, or why it is not a matrix}."""


def fingerprint(specs: Mapping[str, Spec]) -> str:
    """A hash (16 hex digits) of {block name: `Spec`}, equal for models with equal blocks on any device."""
    layouts = {name: "assumed" if s.assumed else s.layout for name, s in specs.items()}
    fields = [(s.name, s.kind, s.parameters, s.shapes, s.layers, layouts[n], str(s.dtype)) for n, s in specs.items()]
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def agree(reports: Sequence[Mapping[str, Any]]) -> Agreed:
    """The totals of a refresh from the reports of all processes, in the order of ranks.

    A GramianError is raised if two differ in model, options, seed, step, kind of estimate (empirical, drawn, exact) or head.
    """
    first = reports[0]
    for rank, report in enumerate(reports):
        for name in ("model", "options", "seed", "step", "estimate"):
            if report[name] != first[name]:
                raise GramianError(_difference(name, first[name], report[name], rank))
    heads = {report["head"]: rank for rank, report in enumerate(reports) if report["head"] is not None}
    if len(heads) > 1:
        (one, at), (other, elsewhere), *_ = heads.items()
        raise GramianError(
            f"head: is {one!r} on process {at} and {other!r} on process {elsewhere}; expected the same, or head="
        )
    padded: dict[str, tuple[int, float]] = {}
    for report in reports:
        for layer, (tokens, terms) in report["padded"].items():
            before = padded.get(layer, (0, 0.0))
            padded[layer] = (before[0] + tokens, before[1] + terms)
    problems = [f"process {rank}: {report['problem']}" for rank, report in enumerate(reports) if report["problem"]]
    free = [report["free"] for report in reports if report["free"] is not None]
    return Agreed(
        terms=math.fsum(report["terms"] for report in reports),
        samples=sum(report["samples"] for report in reports),
        passes=sum(report["passes"] for report in reports),
        head=next(iter(heads), None),
        padded=padded,
        problem=(problems[0] if len(reports) > 1 else first["problem"]) if problems else "",
        free=min(free) if free else None,
        observed=_observed([report["observed"] for report in reports]),
    )


def _observed(reports: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """{parameter of an assumed form: what all processes have seen of it}: a layout if it is that of all, else a reason."""
    found: dict[str, str] = {}
    for name, seen in [item for report in reports for item in report.items()]:
        before = found.setdefault(name, seen)
        both = {before, seen}
        if before != seen and both & {*LAYOUTS, *CONTRADICTIONS}:
            found[name] = BOTH_WAYS if both <= {*LAYOUTS, BOTH_WAYS} else OTHERWISE
    return found


def _difference(name: str, first: Any, other: Any, rank: int) -> str:
    """The error message for a report field `name` that is `first` on process 0 and `other` on process `rank`."""
    if name == "model":
        return f"model: trained layers of process {rank} are not those of process 0; expected the same model everywhere"
    if name == "seed":
        return f"generator: process {rank} drew another seed than process 0; expected the same state everywhere"
    if name == "step":
        return (
            f"capture: process {rank} is at step {other}, process 0 at step {first}; "
            "expected every capture and collection on every process"
        )
    if name == "options":
        name = next(option for option in first if first[option] != other[option])
        first, other = first[name], other[name]
    return f"{name}: is {first!r} on process 0 and {other!r} on process {rank}; expected the same everywhere"
