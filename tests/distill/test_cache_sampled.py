"""Sampled teachers: unbiased, keyed by window and place, as even as a sample can be."""

import math

import pytest
import torch

from gramian.distill.cache import Samples
from gramian.distill.cache.sampled_cache import draw
from gramian.distill.loss.head import Head
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, SampledSignal
from tests.distill.teachers import batch_of, gpt, windows

P_V = torch.tensor([0.5, 0.0, 0.26, 1e-5, 0.14, 0.09999, 0.0], dtype=torch.float64)


def weights_of(ids_NK: torch.Tensor, counts_NK: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[N, V], in float64."""
    empty_NV = torch.zeros(len(ids_NK), vocabulary, dtype=torch.float64)
    return empty_NV.scatter_add(-1, ids_NK, counts_NK.double() / counts_NK.sum(-1, keepdim=True))


@pytest.mark.oracle
@pytest.mark.parametrize("draws", [1, 3, 12, 50])
def test_the_mean_over_all_numbers_is_the_distribution(draws: int) -> None:
    """E over U by the midpoint rule on 20,000 cells: each edge of the distribution cuts one cell per draw at most."""
    cells = 20_000
    uniform_N = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    ids_NK, counts_NK = draw(P_V.expand(cells, -1), uniform_N, draws)
    mean_V = weights_of(ids_NK, counts_NK, len(P_V)).mean(0)
    assert (mean_V - P_V).abs().max() <= 2.0 / cells
    assert mean_V[1] == mean_V[6] == 0.0


@pytest.mark.parametrize("draws", [1, 3, 12, 50])
def test_a_count_is_the_floor_or_the_ceiling_of_what_is_expected(draws: int) -> None:
    uniform_N = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_NV = torch.rand(500, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    ids_NK, counts_NK = draw(p_NV, uniform_N, draws)
    weights_NV = weights_of(ids_NK, counts_NK, 9)
    assert torch.equal((counts_NK > 0).sum(-1), (weights_NV > 0).sum(-1))  # every id once
    assert ((weights_NV - p_NV).abs() < 1.0 / draws + 1e-9).all()
    assert torch.allclose(weights_NV.sum(-1), torch.ones(500, dtype=torch.float64))


@pytest.mark.oracle
def test_draws_of_many_windows_are_unbiased() -> None:
    """By Hoeffding, a mean of N numbers in [0, 1] is off by ε with probability ≤ 2 exp(−2Nε²); 7 ids, all at once 1e-6."""
    tokens, length = 40_000, 20
    kind = Samples(draws=1, temperature=2.0)
    logits_V = P_V.clamp(min=1e-12).log() * 2.0  # at T = 2 these are P_V
    hidden_BTD = logits_V.expand(tokens // length, length, -1)
    head = Head(torch.eye(7, dtype=torch.float64))
    values, _ = kind.encode(DenseSignal(hidden_BTD, head), torch.arange(tokens // length), kind.facts(head), False)
    mean_V = weights_of(values["ids"].flatten(0, 1), values["counts"].flatten(0, 1), 7).mean(0)
    allowed = math.sqrt(math.log(2 * 7 / 1e-6) / (2 * tokens))
    assert (mean_V - P_V).abs().max() < allowed
    wrong_V = P_V.sqrt() / P_V.sqrt().sum()
    assert (mean_V - wrong_V).abs().max() > 3 * allowed  # another temperature would be seen


def test_draws_belong_to_the_window_and_not_to_its_batch() -> None:
    data, teacher, kind = windows(), LiveTeacher(gpt()), Samples(draws=6)
    facts = kind.facts(teacher.head)

    def drawn(index: list[int], kind: Samples = kind) -> SampledSignal:
        batch = batch_of(data, index)
        values, errors = kind.encode(teacher(batch), batch["windows"], kind.facts(teacher.head), True)
        assert not errors.worst
        return kind.decode(values, {}, facts, None)

    together = drawn([4, 9, 4, 2])
    for row, window in enumerate([4, 9, 4, 2]):
        alone = drawn([window])
        assert torch.equal(alone.ids_BTK[0], together.ids_BTK[row])
        assert torch.equal(alone.weights_BTK[0], together.weights_BTK[row])
    assert not torch.equal(drawn([4]).ids_BTK, drawn([4], Samples(draws=6, seed=1)).ids_BTK)


def test_tokens_of_a_window_do_not_share_a_number() -> None:
    kind, head = Samples(draws=1), Head(torch.eye(64))
    values, _ = kind.encode(DenseSignal(torch.zeros(8, 50, 64), head), torch.arange(8), kind.facts(head), False)
    assert len(values["ids"].unique()) > 60  # of 64, after 400 draws
    assert all(len(values["ids"][row].unique()) > 20 for row in range(8))
