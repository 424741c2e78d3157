"""The parameters that have a Fisher block, and checks of models and gradients against them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import full_vector
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.consistency import check_vector, module_of, unique_parameters
from gramian.curvature.blocks.parameter_parts import whole_shapes
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.linalg.wide import wide


def blocks_of(kfac: Any, argument: str = "kfac") -> dict[str, Block]:
    """{name: `Block`} of a KFACNaturalGradient; a GramianError, naming `argument`, for another type or without factors."""
    if not isinstance(kfac, KFACNaturalGradient):
        raise GramianError(f"{argument}: expected a KFACNaturalGradient, got {type(kfac).__name__}")
    if not kfac.kfac_factors:
        raise GramianError(f"{argument}: has no factors yet; expected a capture or collect_kfac_factors before")
    return kfac.kfac_factors


def fisher_parameters(kfac: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters that have a Fisher block; a GramianError if `kfac` has no factors."""
    return whole_shapes(parts_source(kfac))


def parts_source(kfac: KFACNaturalGradient) -> list[Spec]:
    """The specs of a Fisher's blocks, and of those parts of their parameters that no data has reached."""
    specs = {name: block.spec for name, block in blocks_of(kfac).items()}
    owners = {name for spec in specs.values() for name in spec.owners}
    beside = {name: spec for name, spec in kfac.state.specs.items() if not owners.isdisjoint(spec.owners)}
    return [*(beside | specs).values()]


def parameters_of(model: Any, wanted: Mapping[str, Sequence[int]] | None = None) -> dict[str, nn.Parameter]:
    """{name: parameter} of a model, wrapped or not; tied parameters under their first name.

    A GramianError is raised if a parameter of `wanted`, {name: shape}, is missing or has another shape; None: no check.
    """
    found = dict(unique_parameters(module_of(model)))
    for name, shape in (wanted or {}).items():
        if name not in found:
            raise GramianError(f"model: has no parameter {name}; expected the model that the Fisher belongs to")
        if tuple(found[name].shape) != tuple(shape):
            raise GramianError(
                f"model: {name} has shape {list(found[name].shape)}; expected {list(shape)}, as in the model that the "
                "Fisher belongs to"
            )
    return found


def completed_gradient(kfac: Any, what: str, gradient: Any) -> dict[str, Tensor]:
    """{parameter: gradient} in float32 or float64, with zeros for missing parameters of a block.

    These are added because (F + damping)⁻¹ g is not zero for them. A GramianError, which calls the argument `what`, is raised
    unless `gradient` is a nonempty mapping of finite tensors for parameters that have a Fisher block.
    """
    blocks = blocks_of(kfac)
    check_vector(what, gradient)
    assert isinstance(gradient, Mapping)
    if not gradient:
        raise GramianError(f"{what}: has no gradient; expected loss.backward() before")
    found = {name: wide(value.detach()) for name, value in gradient.items()}
    strange = next((name for name in found if name not in fisher_parameters(kfac)), None)
    if strange is not None:
        raise GramianError(f"{what}: {strange} has a gradient but no curvature; expected it in the captured backward")
    bad = next((name for name, value in found.items() if bool(full_vector((~value.isfinite()).sum()))), None)
    if bad is not None:
        raise GramianError(f"{what}: {bad} holds NaN or infinity; expected a finite gradient")
    shapes = fisher_parameters(kfac)
    for block in blocks.values():
        there = [found[name] for name in block.spec.owners if name in found]
        for name in block.spec.owners if there else ():
            found.setdefault(name, there[0].new_zeros(shapes[name]))
    return found
