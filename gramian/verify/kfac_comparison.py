"""Compare K-FAC's factors and natural gradients with the dense reference, or with another K-FAC object.

Legend: O outputs, M inputs with the bias.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gramian.curvature import Block, KFACNaturalGradient
from gramian.verify.checks import Comparison, relative_error
from gramian.verify.kfac_reference import DAMPING, DAMPING_A, DAMPING_G, KAPPA, ExpectedBlock, KFACReference


def make_kfac(mode: str = "pi", policy: str = "all", clip: bool = False, **options: Any) -> KFACNaturalGradient:
    """Make a K-FAC object with damping mode `mode`, storage policy `policy` and, with `clip`, the condition-number clip.

    Its size thresholds are low, so that policies differ on small models; `options` are further keyword arguments.
    """
    if mode == "factored":
        options |= {"damping_A": DAMPING_A, "damping_G": DAMPING_G}
    return KFACNaturalGradient(
        damping=DAMPING,
        damping_mode=mode,
        kfac_policy=policy,
        kfac_big_threshold=30,
        kfac_auto_rho=0.5,
        use_eigenvalue_correction=clip,
        max_condition_number=KAPPA,
        update_freq=1,
        **options,
    )


def _as_matrix(block: Block, tensors: Mapping[str, Tensor]) -> Tensor:
    """Arrange the tensors of a K-FAC block's parameters (weight, bias) as a matrix [O, M], with the bias as last column."""
    weight, *bias = (tensors[name] for name in block.spec.parameters)
    if block.A is None:
        return weight.reshape(-1, 1)
    weight = weight.reshape(block.spec.inputs, -1).mT if block.spec.layout == "table" else weight.flatten(1)
    return torch.cat([weight, bias[0][:, None]], dim=1) if bias else weight


def compare_factors(
    kfac: KFACNaturalGradient, expected: Mapping[str, ExpectedBlock], case: str
) -> Iterator[Comparison]:
    """Compare the factors A and G of every K-FAC block (parameters of a layer) with those of the dense reference.

    Raises:
        ValueError: if one of them lacks a block.
    """
    if set(kfac.kfac_factors) != set(expected):
        raise ValueError(f"blocks {sorted(kfac.kfac_factors)}, expected {sorted(expected)}")
    for name, block in kfac.kfac_factors.items():
        wanted = expected[name]
        if block.A is not None and wanted.A is not None:
            yield Comparison(f"{name} A", case, relative_error(block.A.to_dense(), wanted.A))
        yield Comparison(f"{name} G", case, relative_error(block.G.to_dense(), wanted.G))


def _raised_damping(block: Block, mode: str) -> float | None:
    """The larger damping that a K-FAC block uses in place of the condition-number clip, if it declares so; else None."""
    joint = block.clips.get("joint")
    if mode != "joint" or joint is None or not block.G.work.clip_note.startswith("damping raised"):
        return None
    return joint.floor


def compare_natural(
    kfac: KFACNaturalGradient,
    natural: Mapping[str, Tensor],
    reference: KFACReference,
    mode: str,
    power: float,
    clip: bool,
    case: str,
) -> Iterator[Comparison]:
    """Compare the natural gradient (F + damping)^power ∇ of every K-FAC block, with curvature F, with the dense reference.

    `natural` are the library's, {parameter: tensor}; `mode` is the damping mode, `clip` whether condition numbers are clipped.
    If a block declares an approximation of the clip, the reference computes the same approximation.
    """
    for name, block in kfac.kfac_factors.items():
        damping = _raised_damping(block, mode)
        exact = damping is None
        wanted = reference.natural(name, mode, power, clip and exact, damping or DAMPING)
        error = relative_error(_as_matrix(block, natural), wanted)
        yield Comparison(name, case, error, "" if exact else "clip by a larger damping")


def compare_kfac(kfac: KFACNaturalGradient, other: KFACNaturalGradient, case: str) -> Iterator[Comparison]:
    """Compare the factors A and G of every block (parameters of a layer) of two K-FAC objects.

    Raises:
        ValueError: if one of them lacks a block.
    """
    if set(kfac.kfac_factors) != set(other.kfac_factors):
        raise ValueError(f"blocks {sorted(kfac.kfac_factors)}, expected {sorted(other.kfac_factors)}")
    for name, block in kfac.kfac_factors.items():
        for side, factor in block.factors.items():
            wanted = other.kfac_factors[name].factors[side].to_dense()
            yield Comparison(f"{name} {side}", case, relative_error(factor.to_dense(), wanted))
