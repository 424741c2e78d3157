"""Tiny subjects of an analysis."""

import torch
from torch import Tensor, nn

from gramian.analysis import Settings, Subject

VOCABULARY = 5
SETTINGS = Settings(fisher="empirical", damping=0.1, eigenvalues=4, probes=2, steps=4)


class Tiny(nn.Module):
    """An embedding, two layers and a head: dense matrices of it can be written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = torch.tanh(block(x_BTD) + x_BTD.mean(1, keepdim=True))
        return self.head(x_BTD)


def tiny(rows: tuple[int, ...] = (3, 2), ignored: bool = True) -> Subject:
    """In float64; batches of so many rows of 4 tokens, two of whose targets do not count."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tiny().double().eval()
    tokens_BT = torch.randint(VOCABULARY, (sum(rows), 4), generator=generator)
    targets_BT = torch.randint(VOCABULARY, (sum(rows), 4), generator=generator)
    if ignored:
        targets_BT[0, 3] = targets_BT[2, 1] = -100
    parts = zip(tokens_BT.split(rows), targets_BT.split(rows), strict=True)
    return Subject(
        model,
        [{"tokens_BT": tokens, "labels": labels} for tokens, labels in parts],
        {"kind": "tiny", "weights": "fresh", "dtype": "fp64"},
        {"length": 4, "windows": sum(rows), "windows_in_all": sum(rows), "digest": "d1"},
    )


def joined(subject: Subject) -> dict[str, Tensor]:
    """All batches as one."""
    return {name: torch.cat([batch[name] for batch in subject.batches]) for name in subject.batches[0]}
