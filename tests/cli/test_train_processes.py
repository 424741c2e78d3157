"""`gramian train` as one process of several: who speaks, and with which code all of them end."""

import pytest
import torch

from gramian.cli import main
from gramian.cli.command_errors import RunFailed
from gramian.cli.train import _one_line_failures
from gramian.core.errors import GramianError
from gramian.parallel.process_grid import ProcessGrid

OTHERS = "; expected every process to leave the capture without an error"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_alone_says_what_is_wrong_with_a_config(rank, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", str(rank))
    path = tmp_path / "bad.toml"
    path.write_text("[run]\nsteps = -1\n")
    assert main(["train", str(path)]) == 2
    assert ("run.steps" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize(
    "told, failed",
    [
        ("process 1: MemoryError: none left; expected every process to make its factors", True),
        ("process 1: OutOfMemoryError while its sums were looked at (of 8 GB)" + OTHERS, True),
        ("process 12: KeyboardInterrupt inside the capture ()" + OTHERS, True),
        ("process 1: GramianError inside the capture (num_terms: expected a number)" + OTHERS, False),
        ("process 1: head: the model has no module 3; expected the name of its output layer" + OTHERS, False),
        ("damping: is 0.1 on process 0 and 0.2 on process 1; expected the same everywhere", False),
    ],
)
def test_processes_end_with_the_code_of_the_one_that_failed(told, failed):
    """It ends with 1 of an error, and with 2 of bad input."""
    with pytest.raises(RunFailed if failed else GramianError, match="process"), _one_line_failures(_of_two()):
        raise GramianError(told)


def _of_two() -> ProcessGrid:
    return ProcessGrid(0, 2, torch.device("cpu"), "ddp")
