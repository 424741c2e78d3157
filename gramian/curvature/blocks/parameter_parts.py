"""Vectors over parameters {name: tensor} as vectors over the parts that have blocks of their own, and back.

Inside K-FAC a part ("experts.w[3]") is a name like any other, so that no stage but the entrance knows parameters with several
matrices. Parts are views; joining them copies.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.parallel.placement import place_like
from gramian.taps.products.parts import owner, part_of, view


@dataclass(frozen=True)
class ParameterParts:
    """The parts of every parameter that has several matrices."""

    names: dict[str, list[str]]
    """{parameter: names of its parts}."""
    shapes: dict[str, tuple[int, ...]]
    """{parameter: its shape}."""

    @classmethod
    def of(cls, specs: Iterable[Spec]) -> "ParameterParts":
        """The parts that occur in blocks."""
        found = cls({}, {})
        for spec in specs:
            for name, shape in zip(spec.parameters, spec.shapes, strict=True):
                parameter, rows = part_of(name)
                if rows is None:
                    continue
                found.names.setdefault(parameter, []).append(name)
                stop, rest = (rows + 1, shape) if isinstance(rows, int) else (rows.stop, shape[1:])
                before = found.shapes.get(parameter, (0,))[0]
                found.shapes[parameter] = (max(stop, before), *rest)
        return found

    def split(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vector with the parts of a parameter, as views, in its place. A DTensor is gathered first (collective).

        A GramianError is raised for a parameter with another shape than at the capture.
        """
        found: dict[str, Tensor] = {}
        for name, t in vector.items():
            if name not in self.names:
                found[name] = t
                continue
            if tuple(t.shape) != self.shapes[name]:
                raise GramianError(
                    f"{name}: has shape {list(t.shape)}; expected {list(self.shapes[name])}, as at the capture"
                )
            whole = t.full_tensor() if isinstance(t, DTensor) else t
            found |= {part: view(whole, part) for part in self.names[name]}
        return found

    def join(self, found: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The inverse of `split`; parts that are missing become zeros. Parameters are placed as those in `like` are."""
        joined: dict[str, Tensor] = {}
        for name, t in found.items():
            parameter = owner(name)
            if parameter not in self.names:
                joined[name] = t
            elif parameter not in joined:
                joined[parameter] = self._whole(parameter, found, (like or {}).get(parameter))
        return joined

    def _whole(self, parameter: str, found: Mapping[str, Tensor], like: Tensor | None) -> Tensor:
        parts = [name for name in self.names[parameter] if name in found]
        first = found[parts[0]]
        if like is None or isinstance(like, DTensor):
            whole = first.new_zeros(self.shapes[parameter])
        else:
            whole = torch.zeros_like(like, dtype=first.dtype)
        for name in parts:
            view(whole, name).copy_(found[name])
        return place_like(whole, like) if isinstance(like, DTensor) else whole


def whole_shapes(specs: Iterable[Spec]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters of some blocks, those with parts as a whole."""
    specs = list(specs)
    parts = ParameterParts.of(specs).shapes
    named: Iterator[tuple[str, tuple[int, ...]]] = (
        (owner(name), shape) for spec in specs for name, shape in zip(spec.parameters, spec.shapes, strict=True)
    )
    return {name: parts.get(name, tuple(shape)) for name, shape in named}
