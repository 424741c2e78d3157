"""`gramian verify kfac` on several processes: it passes, and what is wrong on one of them fails on all."""

import re
from functools import partial
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.curvature.refresh.join_sums import Join
from gramian.parallel.exchange import Exchange
from gramian.parallel.process_grid import ProcessGrid
from gramian.verify import kfac_processes
from gramian.verify.checks import VerifyOutcome, run_checks
from gramian.verify.model_layouts import ModelLayout
from tests.cli.torchrun import on_processes
from tests.kit.processes import distributed, run_on_ranks

FEW = kfac_processes.CASES[::7]
FEWEST = FEW[::4]
CPU = torch.device("cpu")


def test_the_sample_holds_every_option():
    for field in ("reduction", "policy", "mode", "clip"):
        wanted = {getattr(case, field) for case in kfac_processes.CASES}
        assert {getattr(case, field) for case in FEW} == wanted
    assert [case.reduction for case in FEWEST] == ["gram", "gather", "dense"]


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fsdp"], "FSDP2 over 1"),
        (["--tp"], "tensor parallel over 1"),
        pytest.param(["--fsdp", "--tp"], "FSDP2 over 1 × tensor parallel over 1", marks=pytest.mark.full),
    ],
)
def test_a_world_of_one_passes(options, said, capsys, monkeypatch):
    monkeypatch.setattr(kfac_processes, "plan", partial(kfac_processes.plan, models=("mlp",), cases=FEWEST))
    status = main(["verify", "kfac", *options])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, ""), captured.out
    assert f"{said}, against one process" in captured.out
    assert re.fullmatch(r"(\d) of \1 checks passed", captured.out.splitlines()[-1])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("size", "fsdp", "tp", "shape", "said"),
    [
        (1, True, False, (1, 1), "FSDP2 over 1"),
        (3, False, False, (3, 1), "DDP over 3"),
        (4, False, True, (1, 4), "tensor parallel over 4"),
        (4, True, True, (2, 2), "FSDP2 over 2 × tensor parallel over 2"),
        (3, True, True, (1, 3), "FSDP2 over 1 × tensor parallel over 3"),
    ],
)
def test_processes_in_a_grid(size, fsdp, tp, shape, said):
    for rank in range(size):
        layout = ModelLayout(ProcessGrid(rank, size, CPU, "ddp"), fsdp, tp)
        assert (layout.data, layout.tensor) == shape
        assert layout.rank == rank // layout.tensor
    assert str(layout) == said


# ---- several processes -----------------------------------------------------------------------------------------------


def outcomes(
    rank: int, size: int, models: tuple[str, ...], fsdp: bool, tp: bool = False, cases: Any = FEW
) -> list[VerifyOutcome]:
    layout = ModelLayout(ProcessGrid(rank, size, CPU, "fsdp2" if fsdp else "ddp"), fsdp, tp)
    return run_checks(kfac_processes.plan(layout, models, cases), stop_at_crash=True)


def scaled(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.001


def a_token_too_many(function: Any) -> Any:
    """The bound of a subset is that of this process's keys."""
    return lambda self, moment, reports, keep, device: ([0 if r is None else r.stored for r in reports], 1.0)


BUGS: dict[str, tuple[Any, str, Any, str]] = {
    "all-to-all": (Exchange, "reshard", scaled, "factors A and G"),
    "all-gather": (Exchange, "gather_rows", scaled, "factors A and G"),
    "all-reduce": (Exchange, "sum", scaled, "factors A and G"),
    "features": (Exchange, "gather_features", scaled, "natural gradient, pi damping"),
    "keys": (Join, "_subset", a_token_too_many, "a keyed subset of tokens"),
}


def with_a_bug(rank: int, size: int, bug: str) -> list[str]:
    owner, name, broken, _ = BUGS[bug]
    plain = getattr(owner, name)
    setattr(owner, name, broken(plain))
    try:
        return [outcome.check.name for outcome in outcomes(rank, size, ("mlp",), False) if not outcome.passed]
    finally:
        setattr(owner, name, plain)


@pytest.mark.full
@distributed(world_size=2)
def test_two_processes_agree_with_the_oracle(rank: int, world_size: int) -> None:
    found = outcomes(rank, world_size, ("mlp",), fsdp=False, cases=FEWEST)
    assert [outcome.problem for outcome in found] == [""] * len(found)
    assert len(found) >= 7


FULL = pytest.mark.full


@FULL
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("models", [("mlp",), ("gpt",), ("tied gpt",), ("conv net",), ("deep linear",)])
@distributed(world_size=3)
def test_three_processes_agree_with_the_oracle(rank: int, world_size: int, models: tuple[str, ...], fsdp: bool) -> None:
    assert [outcome.problem for outcome in outcomes(rank, world_size, models, fsdp)] == [""] * 9


@FULL
@pytest.mark.parametrize("fsdp", [False, True], ids=["tensor parallel", "two dimensions"])
@distributed(world_size=2)
def test_two_processes_that_share_layers_agree_with_the_oracle(rank: int, world_size: int, fsdp: bool) -> None:
    assert [outcome.problem for outcome in outcomes(rank, world_size, ("mlp", "gpt"), fsdp, tp=True)] == [""] * 18


@FULL
@pytest.mark.parametrize("fsdp", [False, True], ids=["tensor parallel", "two dimensions"])
@distributed(world_size=3)
def test_three_processes_share_layers_that_cannot_be_cut_evenly(rank: int, world_size: int, fsdp: bool) -> None:
    """Of 32 features torch gives each process 11, 11 and 10, and its local tensors do not say that there are 32."""
    assert [outcome.problem for outcome in outcomes(rank, world_size, ("mlp", "gpt"), fsdp, tp=True)] == [""] * 18


@FULL
@distributed(world_size=4)
def test_a_grid_of_four_processes_agrees_with_the_oracle(rank: int, world_size: int) -> None:
    assert [outcome.problem for outcome in outcomes(rank, world_size, ("mlp", "gpt"), True, tp=True)] == [""] * 18


@FULL
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_library_is_seen_on_every_process(bug: str) -> None:
    for failed in run_on_ranks(2, with_a_bug, bug):
        assert BUGS[bug][3] in failed


# ---- the command under torchrun --------------------------------------------------------------------------------------


def command(*options: str, breaks: str = "", models: tuple[str, ...] = ("mlp",)) -> Any:
    prepare = (
        "from functools import partial; from gramian.verify import kfac_processes as m;"
        f"m.plan = partial(m.plan, models={models!r}, cases=m.CASES[::7])\n"
    )
    return on_processes(["verify", "kfac", *options], prepare + breaks)


@FULL
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
def test_the_first_process_alone_prints(option):
    done = command(*option, "--verbose", models=("mlp", "gpt"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checks passed") == 1
    assert ("FSDP2 over 2" if option else "DDP over 2") in done.stdout
    assert all(f"process {rank} ends with 0" in done.stderr for rank in (0, 1))
    assert re.search(r"blocks\.0\.fc A +gram, all, an empty rank", done.stdout)
    told = [line for line in done.stderr.splitlines() if not line.startswith("process ")]
    assert told == []


WRONG_ON_ONE = """
from gramian.parallel.exchange import Exchange
plain = Exchange.gather_rows
Exchange.gather_rows = lambda *args: plain(*args) * (1.001 if rank == 1 else 1.0)
"""
CRASH_OF_ONE = """
from gramian.curvature.estimate.token_moments import TokenMoment
plain = TokenMoment.row_matrix
def broken(self, bias):
    if rank == 1:
        raise RuntimeError("no luck")
    return plain(self, bias)
TokenMoment.row_matrix = broken
"""


@FULL
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize(
    ("breaks", "said"), [(WRONG_ON_ONE, "process 1: error"), (CRASH_OF_ONE, "no luck")], ids=["wrong", "crash"]
)
def test_what_is_wrong_on_one_process_ends_both_with_1(option, breaks, said):
    done = command(*option, breaks=breaks)
    assert done.returncode == 1
    assert all(f"process {rank} ends with 1" in done.stderr for rank in (0, 1)), done.stderr
    assert re.search(rf"FAILED mlp: factors A and G: .*{said}", done.stdout), done.stdout
    assert done.stderr.count("gramian: verify kfac:") == 1
