"""Samples alone: padding that leaks from one sample into another is seen, with dropout and whatever sample hides it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import gramian
from gramian.errors import GramianError
from gramian.taps.hub import hub_of


class Pooled(nn.Module):
    """Tokens, dropout, the mean over a record's tokens, with or without its mask, a head."""

    def __init__(self, masked: bool, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout, self.head = nn.Embedding(11, 6), nn.Dropout(dropout), nn.Linear(6, 3)
        self.masked = masked

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.tokens(ids)))
        real = (ids > 0).to(h)[..., None] if self.masked else torch.ones_like(h[..., :1])
        return self.head((h * real).sum(1) / real.sum(1) * weights[:, None])


def collate(records: Any) -> tuple[Tensor, Tensor]:
    return pad_sequence([ids for ids, _ in records], batch_first=True), torch.stack([weight for _, weight in records])


def records(hidden: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Eight records of different lengths; so many of the shortest have no weight, which hides what they are."""
    torch.manual_seed(0)
    lengths = [2, 3, 4, 5, 7, 8, 9, 9]
    return [(torch.randint(1, 11, (n,)), torch.tensor(float(i >= hidden))) for i, n in enumerate(lengths)]


def run(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    engine = gramian.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=len(data), collate_fn=collate),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    try:
        for ids, weights in loader:
            model(ids, weights).square().sum(1).mean().backward()
    finally:
        engine.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [0, 2])
def test_padding_that_leaks_is_refused(dropout: float, hidden: int) -> None:
    with pytest.raises(GramianError, match=r"alone has a gradient.*expected samples that do not depend on each other"):
        run(Pooled(masked=False, dropout=dropout), records(hidden))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [0, 2])
def test_padding_that_is_masked_is_exact(dropout: float, hidden: int) -> None:
    model = Pooled(masked=True, dropout=dropout)
    run(model, records(hidden))
    assert [proven.alone for proven in hub_of(model).proof.proven.values()] == ["collated"]
    assert model.training and model.dropout.training


def test_modules_run_in_their_own_modes_again_after_a_proof_without_dropout() -> None:
    model = Pooled(masked=True, dropout=0.5)
    model.head.eval()
    run(model, records())
    assert model.training and not model.head.training
