"""The numbers of the table, against float64 and by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.cli.demo.score import ROWS, Score, score, work
from gramian.data import Windows, load_windows
from gramian.data.options import DataSection
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.models.gpt import GPT, GPTConfig
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.config.config_sections import PrecisionSection
from gramian.train.loop.precision import resolve_precision

ONE = ProcessGrid(0, 1, torch.device("cpu"), "one")
COUNT = ROWS + 3
"""Not a whole number of batches."""


def windows(length: int = 16) -> Windows:
    return load_windows(DataSection(limit_bytes=200_000, length=length))[1]


def model(seed: int, validation: Windows) -> GPT:
    shape = GPTConfig(vocabulary=validation.vocabulary, context=validation.length, layers=1, width=16, heads=2)
    found = GPT(shape, seed=seed)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(3.0)  # distributions that are far from uniform, and from each other
    return found


def scored(student: GPT, teacher: GPT | None, validation: Windows, count: int = COUNT) -> tuple[Score, list[int]]:
    heard: list[int] = []
    live = None if teacher is None else LiveTeacher(teacher)
    found = score(
        student, live, validation, resolve_precision(PrecisionSection(), ONE.device), ONE, count, heard.append
    )
    return found, heard


def by_hand(student: GPT, teacher: GPT, validation: Windows) -> dict[str, float]:
    """From whole float64 log-probabilities."""
    rows = [validation[index] for index in range(COUNT)]
    tokens_BT, targets_N = (torch.stack([row[name] for row in rows]) for name in ("tokens", "targets"))
    targets_N = targets_N.flatten()

    def log_probabilities(net: GPT) -> Tensor:
        with torch.no_grad():
            return net.double()(tokens_BT).flatten(0, 1).log_softmax(-1)

    q_NV, p_NV = log_probabilities(student), log_probabilities(teacher)
    gold_q, gold_p = (x.gather(1, targets_N[:, None]).flatten() for x in (q_NV, p_NV))
    found: dict[str, Any] = {
        "loss": -gold_q.mean(),
        "perplexity": (-gold_q.mean()).exp(),
        "agreement": (q_NV.argmax(1) == p_NV.argmax(1)).double().mean(),
        "correlation": torch.corrcoef(torch.stack([gold_q, gold_p]))[0, 1],
        "kl": (p_NV.exp() * (p_NV - q_NV)).sum(1).mean(),
    }
    return {name: float(value) for name, value in found.items()}


@pytest.mark.oracle
def test_scores_are_those_of_whole_log_probabilities() -> None:
    validation = windows()
    student, teacher = model(1, validation), model(2, validation)
    found, _ = scored(student, teacher, validation)
    for name, expected in by_hand(student, teacher, validation).items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-5), name


def test_a_model_agrees_with_itself() -> None:
    validation = windows()
    one = model(1, validation)
    found, _ = scored(one, one, validation)
    assert found.agreement == 1.0
    assert found.correlation == pytest.approx(1.0, abs=1e-6)
    assert found.kl == pytest.approx(0.0, abs=1e-6)


@pytest.mark.oracle
def test_sliding_scores_the_same_tokens_with_half_a_window_before_each() -> None:
    validation = windows()
    one, length = model(1, validation), validation.length
    tokens = torch.from_numpy(validation.stream.read(0, COUNT * length + 1).astype("int64"))
    nats = 0.0
    with torch.no_grad():
        for at in range(1, COUNT * length + 1):
            # Windows begin at multiples of half their length; the first scores all, the others their second half.
            first = 0 if at <= length else (at - 1) // (length // 2) * (length // 2) - length // 2
            nats -= float(one.double()(tokens[None, first:at])[0, -1].log_softmax(-1)[tokens[at]])
    found, _ = scored(one.float(), None, validation)
    assert found.tokens == COUNT * length
    assert found.sliding == pytest.approx(torch.tensor(nats / found.tokens).exp().item(), rel=1e-5)


@pytest.mark.parametrize("length", [2, 7, 16])
@pytest.mark.parametrize("compared", [False, True])
def test_progress_rises_to_all_of_the_work(length: int, compared: bool) -> None:
    validation = windows(length)
    one = model(1, validation)
    _, heard = scored(one, one if compared else None, validation)
    assert heard == sorted(set(heard))
    assert heard[-1] == work(validation, COUNT, compared)


def test_more_windows_than_there_are_are_all_of_them() -> None:
    validation = windows(512)
    one = model(1, validation)
    found, heard = scored(one, one, validation, count=10**6)
    assert found.tokens == len(validation.stream) - 1
    assert heard[-1] <= work(validation, 10**6, True)
