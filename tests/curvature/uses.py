"""What tests of the uses of a Fisher share: two tasks of one small network, and their Fishers written out.

Legend: P entries of all parameters together.
"""

from typing import Any

import torch
from torch import Tensor, nn

import gramian
from tests.curvature.problems import kfac, seeded
from tests.curvature.small import FEW, MANY, WORDS, Net, loss_of, words
from tests.oracles import dense_uses

TASKS = (11, 12)
"""Seeds of the data of two tasks."""
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"shape": MANY, "kfac_policy": "small_only"},
    "low rank": {"shape": FEW},
    "exact head": {"shape": FEW, "kfac_true_fisher_head": True},
    "tied": {"shape": FEW, "tied": True},
    "ekfac": {"shape": MANY, "kfac_policy": "small_only", "ekfac": True, "damping_mode": "joint"},
    "ekfac low rank": {"shape": FEW, "ekfac": True, "damping_mode": "joint"},
    "no layer": {"shape": FEW, "words": 17, "min_layer_size": 100},
}
"""Ways to get every representation: whole, low rank, diagonal minus and plus low rank; eigenvalues that are no
products; exact blocks and diagonals alone."""
OF_THE_NETWORK = ("tied", "words")


def network(kind: str = "dense") -> nn.Module:
    """The same float64 weights every time."""
    return seeded(lambda: Net(**{name: value for name, value in KINDS[kind].items() if name in OF_THE_NETWORK}))


def data(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a task."""
    return words(KINDS[kind]["shape"], seed=seed, count=KINDS[kind].get("words", WORDS))


def moved(model: nn.Module, seed: int) -> nn.Module:
    """The model with other weights near by."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
    return model


def task(model: nn.Module, seed: int, kind: str = "dense", **options: Any) -> gramian.KFACNaturalGradient:
    """The Fisher of a task."""
    told = {name: value for name, value in KINDS[kind].items() if name not in ("shape", *OF_THE_NETWORK)}
    found, batch = kfac(**{**told, **options}), data(kind, seed)
    model.zero_grad()
    with found.capture(model, loss_reduction="sum", num_terms=batch[1].numel(), head="head"):
        loss_of(model, batch, "sum").backward()
    model.zero_grad()
    return found


def names_of(model: nn.Module) -> list[str]:
    """In the order of flat vectors."""
    return [name for name, _ in model.named_parameters()]


def flat(tensors: dict[str, Tensor] | nn.Module, names: list[str]) -> Tensor:
    """[P]."""
    tensors = dict(tensors.named_parameters()) if isinstance(tensors, nn.Module) else tensors
    return dense_uses.flatten(tensors, names)


def written_out(found: gramian.KFACNaturalGradient, model: nn.Module) -> Tensor:
    """F [P, P] from the dense form of every factor, or from EK-FAC's eigenvectors and values."""
    layers, others = [], {}
    for block in found.kfac_factors.values():
        spec, G = block.spec, block.G.to_dense()
        if block.A is None:
            others[spec.parameters[0]] = G
            continue
        F = torch.kron(G, block.A.to_dense())
        if block.correction is not None:
            S, *bases = block.correction.values_RS, block.correction.G, block.correction.A
            Q_G, Q_A = (basis.combined(torch.eye(basis.rank, dtype=torch.float64)) for basis in bases)
            Q = torch.kron(Q_G, Q_A)
            F = Q @ torch.diag(S.flatten().double()) @ Q.mT
        bias = spec.parameters[1] if spec.has_bias else None
        layers.append(dense_uses.LayerBlock(F, spec.parameters[0], bias, spec.layout in ("in_out", "table")))
    return dense_uses.fisher({name: p.shape for name, p in model.named_parameters()}, layers, others)


def gradient_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of the summed loss, as plain autograd has it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(model, batch, "sum"), parameters), strict=True))
