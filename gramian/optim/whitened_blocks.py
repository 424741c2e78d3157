"""Which weights take whitened steps, and the factors of each."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.state import CurvatureState
from gramian.linalg import Diagonal
from gramian.taps.products.parts import owner


@dataclass
class WhitenedBlocks:
    """The blocks of the weights that take whitened steps.

    A part of a parameter that no token has reached yet (an expert) has no factors. It steps with its momentum as the other
    parts do, in the coordinates that it has: factors of zeros, whose damped roots are numbers.
    """

    _unseen: dict[str, Block] = field(default_factory=dict)

    def of(self, state: CurvatureState, allowed: Collection[str]) -> dict[str, Block]:
        """{weight, or part of one: block} of the parameters `allowed` of which the curvature has factors."""
        seen = {block.spec.parameters[0]: block for block in state.blocks.values() if block.A is not None}
        found = {name: block for name, block in seen.items() if owner(name) in allowed}
        owners = {owner(name) for name in found}
        rest = {spec.parameters[0]: spec for spec in state.specs.values() if spec.kind == "kronecker"}
        missing = {name: spec for name, spec in rest.items() if owner(name) in owners and name not in seen}
        self._unseen = {name: self._unseen.get(name) or _without_factors(spec) for name, spec in missing.items()}
        return found | self._unseen


def _without_factors(spec: Spec) -> Block:
    A, G = (Diagonal(torch.zeros(width, device=spec.device)) for width in (spec.inputs, spec.outputs))
    return Block(spec, A, G)
