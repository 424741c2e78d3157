"""A corpus small enough to write every matrix down, with an index of it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.influence import BuildOptions, Index, PassageCorpus, build_index
from gramian.oracles import single_sample
from tests.curvature.problems import seeded
from tests.curvature.small import WORDS, Net
from tests.curvature.uses import flat, names_of, written_out

PASSAGES, LENGTH = 7, 5


def corpus(seed: int = 3, tied: bool = False, passages: int = PASSAGES) -> PassageCorpus:
    """Seven passages of five numbers, and the float64 network that reads them; of one passage all factors are low rank."""
    model = seeded(lambda: Net(tied)).eval()
    ids = torch.randint(WORDS, (PASSAGES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[2, 3:] = -100
    return PassageCorpus(
        model,
        ids[:passages, :-1],
        targets[:passages],
        decode=lambda found: " ".join(str(int(one)) for one in found),
        encode=lambda text: [int(word) for word in text.split()],
    )


def built(folder: Path, found: PassageCorpus | None = None, **options: Any) -> Index:
    """The index of a corpus."""
    found = found or corpus()
    build_index(found, folder, BuildOptions(**{"batch": 3, **options}))
    return Index(found, folder)


def nats(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """−log p of the targets, summed."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")


def gradients(found: PassageCorpus, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """[B, P], by a loop of single-sample backwards."""
    loop = single_sample.per_sample_gradients(found.model, nats, (x_BT, y_BT))
    return torch.cat([loop[name].flatten(1) for name in names_of(found.model)], dim=1)


def damped_inverse(index: Index, share: float = 0.1) -> Tensor:
    """(F + Λ)⁻¹ [P, P], written out: Λ is `share` of each block's mean eigenvalue."""
    model = index.corpus.model
    F_PP = written_out(index.kfac, model)
    names, diagonal = names_of(model), torch.zeros(len(F_PP), dtype=torch.float64)
    sizes = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for block in index.kfac.kfac_factors.values():
        own = flat({n: torch.ones_like(t) if n in block.spec.parameters else t for n, t in sizes.items()}, names).bool()
        diagonal[own] = share * F_PP.diagonal()[own].mean()
    return torch.linalg.inv(F_PP + torch.diag(diagonal))
