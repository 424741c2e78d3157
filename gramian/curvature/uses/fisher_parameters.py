"""Which parameters a Fisher speaks of, for those who use one."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import whole
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import check_vector, module_of, unique_parameters
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.linalg.wide import wide


def blocks_of(kfac: Any) -> dict[str, Block]:
    """The blocks of a Fisher.

    Raises:
        GramianError: if it is none, or has none yet.
    """
    if not isinstance(kfac, KFACNaturalGradient):
        raise GramianError(f"kfac: expected a KFACNaturalGradient, got {type(kfac).__name__}")
    if not kfac.kfac_factors:
        raise GramianError("kfac: has no factors yet; expected a capture or collect_kfac_factors before")
    return kfac.kfac_factors


def covered_parameters(kfac: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters with curvature; raises as `blocks_of` does."""
    specs = [block.spec for block in blocks_of(kfac).values()]
    return {name: tuple(shape) for spec in specs for name, shape in zip(spec.parameters, spec.shapes, strict=True)}


def parameters_of(model: Any, wanted: Mapping[str, Sequence[int]] | None = None) -> dict[str, nn.Parameter]:
    """Every parameter once, under its first name.

    Args:
        model: the user's model, or any wrapper of it.
        wanted: {name: shape} of those that have to be there; None: no matter.

    Raises:
        GramianError: naming one that is not there, or has another shape.
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


def completed(kfac: Any, what: str, gradient: Any) -> dict[str, Tensor]:
    """A gradient, wide, with zeros for what it lacks of a block: (F + damping)⁻¹ g is not zero there.

    Args:
        kfac: the Fisher.
        what: name of the argument.
        gradient: {parameter: tensor}.

    Raises:
        GramianError: if it is none, is empty, is not finite, or has a part without curvature.
    """
    blocks = blocks_of(kfac)
    check_vector(what, gradient)
    assert isinstance(gradient, Mapping)
    if not gradient:
        raise GramianError(f"{what}: has no gradient; expected loss.backward() before")
    found = {name: wide(value.detach()) for name, value in gradient.items()}
    strange = next((name for name in found if name not in covered_parameters(kfac)), None)
    if strange is not None:
        raise GramianError(f"{what}: {strange} has a gradient but no curvature; expected it in the captured backward")
    bad = next((name for name, value in found.items() if bool(whole((~value.isfinite()).sum()))), None)
    if bad is not None:
        raise GramianError(f"{what}: {bad} holds NaN or infinity; expected a finite gradient")
    for block in blocks.values():
        there = [found[name] for name in block.spec.parameters if name in found]
        if there:
            for name, shape in zip(block.spec.parameters, block.spec.shapes, strict=True):
                found.setdefault(name, there[0].new_zeros(shape))
    return found
