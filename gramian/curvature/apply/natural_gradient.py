"""Multiply gradients and other vectors by powers of the damped Fisher, or by the Fisher, with the factors of a state.

The input is a vector v as {parameter: tensor}; the output is {parameter: tensor} of (F + damping)^p v or F v, block by block.
"""

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import Vector, apply, full_vector
from gramian.curvature.apply.ready_operators import ReadyOperators
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.consistency import check_number, check_vector, unique_parameters
from gramian.curvature.blocks.damping import resolve
from gramian.curvature.blocks.parameter_parts import ParameterParts
from gramian.curvature.persist import curvature_record
from gramian.curvature.state import CurvatureState


def gradients_of(root: nn.Module) -> dict[str, Tensor]:
    """{parameter: `p.grad`} of the trainable parameters that have one, tied ones once."""
    return {n: p.grad for n, p in unique_parameters(root) if p.requires_grad and p.grad is not None}


def natural_gradient(
    state: CurvatureState, root: nn.Module, power: float, gradients: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """{parameter: (F + damping)^power ∇} for every gradient ∇; ∇ itself where no capture has reached the parameter.

    `gradients` None: the `p.grad` of the model `root`. A GramianError is raised without gradients or factors.
    """
    check_number("power", power)
    if gradients is None:
        gradients = gradients_of(root)
        if not gradients:
            raise GramianError("model: no parameter has a gradient; expected loss.backward() before")
    check_vector("gradients", gradients)
    specs = state.checked_specs(root)
    parts = ParameterParts.of(specs.values())
    vector = parts.split(gradients)
    plain = _without_curvature(state, vector, specs)
    measured = {name: gradient for name, gradient in vector.items() if name not in plain}
    found = _apply(state, measured, power) if measured else {}
    each = {name: plain[name].clone() if name in plain else found[name] for name in vector}
    return parts.join(each, gradients)


def ready_natural_gradient(
    state: CurvatureState,
    root: nn.Module,
    gradients: Vector,
    power: float = -1.0,
    dots: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """`natural_gradient` by operators that are made once for the current factors (`ready_operators`); for every training step.

    The model `root` is compared with the captured one when operators are made, not at every call. A memory budget does not
    count operators, so all blocks keep the exact path then. `dots`, if given, receives {block, or parameter: 0-dim ∇ᵀ(F +
    damping)^power ∇}.
    """
    started = time.perf_counter()
    parts = ParameterParts.of(state.specs.values())
    vector = parts.split(gradients)
    if state.ready is None or not state.ready.fits(state.blocks, power):
        state.require_factors()
        state.checked_specs(root)
        state.ready = None  # frees the old operators before the new ones are made
        state.ready = ReadyOperators(state.blocks, power, state.options, state.factorisations)
        curvature_record.log_clips(state.blocks.values())
    found = state.ready.apply(vector, dots)
    plain = {name: t for name, t in vector.items() if name not in found}
    if plain:
        _without_curvature(state, plain, state.checked_specs(root))
        if dots is not None:
            dots |= {name: full_vector(g.square().sum(dtype=torch.float64)) for name, g in plain.items()}
    state.seconds["apply"] = time.perf_counter() - started
    return parts.join({name: plain[name].clone() if name in plain else found[name] for name in vector}, gradients)


def fisher_vector_product(state: CurvatureState, vector: Vector, damped: bool) -> dict[str, Tensor]:
    """{parameter: tensor} of F v, or with `damped` (F + damping) v, for all parameters of every block with a parameter in v."""
    check_vector("vector", vector)
    if state.model is not None:
        state.checked_specs(state.model)
    parts = ParameterParts.of(state.specs.values())
    given = parts.split(vector)
    _touched(state, {name: t for name, t in vector.items() if name not in parts.names})
    known = {p for block in state.blocks.values() for p in block.spec.parameters}
    unseen = {name: t for name, t in given.items() if name not in known}  # parts that no token has reached: F is zero
    damping = resolve(state.options.damping_mode, state.options.lambdas, None, (0.0, 0.0))
    value = damping.lambda_A if damping.joint else damping.lambda_A * damping.lambda_G
    found = {name: t * (value if damped else 0.0) for name, t in unseen.items()}
    measured = {name: t for name, t in given.items() if name in known}
    found |= _apply(state, measured, 1.0 if damped else None) if measured else {}
    return parts.join({name: found[name] for name in (*given, *(n for n in found if n not in given))}, vector)


def _apply(state: CurvatureState, vector: Vector, power: float | None) -> dict[str, Tensor]:
    touched = _touched(state, vector)
    started = time.perf_counter()
    found = apply(touched, vector, power, state.options, state.factorisations)
    state.seconds["apply"] = time.perf_counter() - started
    curvature_record.log_clips(touched.values())
    return {name: found[name] for name in (*vector, *(n for n in found if n not in vector))}


def _touched(state: CurvatureState, vector: Vector) -> dict[str, Block]:
    """{name: block} of the blocks that have a parameter in `vector`; a GramianError for a parameter without a block."""
    state.require_factors()
    by_parameter = {p: block for block in state.blocks.values() for p in block.spec.parameters}
    touched: dict[str, Block] = {}
    for name in vector:
        if name not in by_parameter:
            raise GramianError(f"{name}: is not a parameter with curvature; expected names of the captured model")
        touched[by_parameter[name].spec.name] = by_parameter[name]
    return touched


def _without_curvature(state: CurvatureState, gradients: Vector, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """{parameter: gradient} of trained parameters that no capture has reached; their names are added to the state.

    With the option `strict` a GramianError is raised if there are any.
    """
    with_curvature = {p for block in state.blocks.values() for p in block.spec.parameters}
    trained = {p for spec in specs.values() for p in spec.parameters}
    plain = {n: g for n, g in gradients.items() if state.blocks and n in trained and n not in with_curvature}
    if plain and state.options.strict:
        raise GramianError(
            f"{next(iter(plain))}: has a gradient but no curvature; expected it in the captured backward"
        )
    state.without_curvature.update(plain)
    return plain
