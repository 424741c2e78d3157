"""Influence on a GPU: the scores of the CPU, on one process and on two that share the passages."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gramian.parallel.process_grid import DataParallelKind, ProcessGrid
from tests.curvature.problems import assert_close
from tests.influence.corpora import PASSAGES, corpus
from tests.influence.test_processes import answers, build
from tests.kit.processes import run_on_ranks

pytestmark = pytest.mark.gpu


def on_gpu(rank: int, size: int, folder: Path, passages: int) -> dict[str, Tensor]:
    device = torch.device("cuda", 0)
    kind = DataParallelKind.SINGLE if size == 1 else DataParallelKind.DDP
    grid, found = ProcessGrid(rank, size, device, kind), corpus(passages=passages)
    found.model.to(device)
    build(found, folder, grid, gradients="1MB")
    return answers(found, folder, grid)


@pytest.mark.dist
@pytest.mark.parametrize("passages", [PASSAGES, 1])
def test_scores_are_those_of_the_cpu(tmp_path: Path, passages: int) -> None:
    build(corpus(passages=passages), tmp_path / "cpu", ProcessGrid(), gradients="1MB")
    expected = answers(corpus(passages=passages), tmp_path / "cpu", ProcessGrid())
    found = [on_gpu(0, 1, tmp_path / "one", passages), *run_on_ranks(2, on_gpu, tmp_path / "two", passages)]
    for got in found:
        for name, value in expected.items():
            assert_close(got[name], value, 1e-2 if name == "stored" else 1e-7, name)
