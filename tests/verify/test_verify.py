"""`gramian verify`: it passes here, and a library that computes something else does not pass."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gramian.cli import main
from gramian.cli.profile import profile_kfac
from gramian.curvature.blocks.block import Block
from gramian.curvature.estimate import fisher_labels, token_moments
from gramian.curvature.estimate.likelihood import Softmax
from gramian.curvature.estimate.token_selection import TokenSelection
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.clipping import clipping_rule, sample_norms
from gramian.privacy.clipping.gradient_sums import GradientSums
from gramian.taps.gradients import Indexed
from gramian.verify import clipping_matrix, kfac_matrix
from gramian.verify.checks import Comparison, VerifyCheck, VerifyOutcome, relative_error, run_checks
from gramian.verify.profiles import kfac_profile
from tests.cli.torchrun import on_processes
from tests.kit.fresh import run_fresh
from tests.kit.matrix import sample

# A sample: every policy, mode, power and state of the clip is in it, but not every combination.
SAMPLE = kfac_matrix.CASES[::7]
FEW = clipping_matrix.CASES[::4]


def take_sample(monkeypatch: pytest.MonkeyPatch, *models: str) -> None:
    """Let the command check these models on a sample of the cases."""
    plan = partial(kfac_matrix.plan, torch.device("cpu"), models=models, cases=SAMPLE)
    monkeypatch.setattr(kfac_matrix, "plan", plan)


def take_few(monkeypatch: pytest.MonkeyPatch, *models: str) -> None:
    """The same for clipping."""
    monkeypatch.setattr(clipping_matrix, "plan", partial(clipping_matrix.plan, models=models, cases=FEW))


def run(capsys: pytest.CaptureFixture[str], *options: str, target: str = "kfac") -> tuple[int, str, str]:
    status = main(["verify", target, *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_sample_holds_every_option():
    for field in ("policy", "mode", "clip", "power"):
        wanted = {getattr(case, field) for case in kfac_matrix.CASES}
        assert {getattr(case, field) for case in SAMPLE} == wanted
    for field in ("mode", "algorithm", "reduction"):
        wanted = {getattr(case, field) for case in clipping_matrix.CASES}
        assert {getattr(case, field) for case in FEW} == wanted


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], ["TARGET", "expected kfac, clipping"]),
        (["everything"], ["'everything'", "unknown", "expected kfac, clipping"]),
        (["distill", "--tp"], ["--tp", "not for verify distill"]),
        (["resume", "--profile"], ["--profile", "not for verify resume", "expected gramian verify resume"]),
        (["kfac", "run.toml"], ["CONFIG", "'run.toml'", "not for verify kfac"]),
        (
            ["resume", "--tp"],
            ["--tp", "not for verify resume", "expected gramian verify resume [CONFIG.toml] [--fsdp] [--verbose]"],
        ),
        (["clipping", "run.toml"], ["CONFIG", "'run.toml'", "not for verify clipping"]),
        (["kfac", "--verbos"], ["--verbos", "expected", "--verbose"]),
    ],
)
def test_bad_input_exits_2_with_one_line_that_says_what_is_accepted(argv, names, capsys):
    assert main(["verify", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for name in names:
        assert name in captured.err


def test_help_shows_what_works_and_nothing_else(capsys):
    assert main(["verify", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--verbose", "--fsdp", "--tp", "--profile", "kfac", "clipping"))


@pytest.mark.full
@pytest.mark.xdist_group("fresh")
def test_bad_input_loads_neither_rich_nor_the_model():
    check = (
        "import sys; from gramian.cli import main; main(['verify', 'x']); main(['profile', 'kfac', '--width', '0']);"
        "sys.exit(any(name in sys.modules for name in ('rich', 'gramian.models', 'gramian.verify')))"
    )
    assert run_fresh(check).returncode == 0


# ---- a good library --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full
def test_the_whole_matrix_passes_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "gramian", "verify", "kfac"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    count = len(kfac_matrix.plan())
    assert done.stdout.splitlines()[-1] == f"{count} of {count} checks passed"


def test_the_table_has_a_row_per_check_with_error_tolerance_and_verdict(capsys, monkeypatch):
    take_sample(monkeypatch, "mlp", "conv net")
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert all(character == "\n" or character.isprintable() for character in out)
    for check in kfac_matrix.plan():
        assert check.name in out
    rows = [line for line in out.splitlines() if line.rstrip().endswith(" ok")]
    assert len(rows) == len(kfac_matrix.plan()) == 18
    assert all(re.search(r"\d\.\de-\d\d +1e-10  ok|s\.e\. +5 s\.e\.  ok", row) for row in rows)
    assert out.splitlines()[-1] == "18 of 18 checks passed"


@pytest.mark.full
def test_verbose_has_a_row_per_layer_and_case(capsys, monkeypatch):
    take_sample(monkeypatch, "gpt")
    status, out, _ = run(capsys, "--verbose")
    assert status == 0
    for case in SAMPLE:
        mode = out.split(f"gpt: natural gradient, {case.mode} damping")[1].split("gpt: ")[0]
        for layer in ("token_embedding", "blocks.0.fc", "blocks.0.norm_mlp.weight", "head"):
            assert any(line.split()[0] == layer and case.label in line for line in mode.splitlines() if line.strip())


def test_the_progress_bar_is_for_terminals(capsys, monkeypatch):
    monkeypatch.setattr(kfac_matrix, "plan", lambda: [_check(0.0)])
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = run(capsys)
    assert status == 0
    assert "\x1b[" in out and "model: a check" in out


def test_profile_measures_kfac_after_its_checks(capsys, monkeypatch):
    monkeypatch.setattr(kfac_matrix, "plan", lambda: [_check(0.0)])
    monkeypatch.setitem(profile_kfac.DEFAULTS, "seq_lengths", [8])
    monkeypatch.setitem(profile_kfac.DEFAULTS, "width", 16)
    status, out, err = run(capsys, "--profile")
    assert (status, err) == (0, "")
    for stage in ("plain step", "capture", "decompose", "apply"):
        assert re.search(rf"{stage} +[\d,]+\.\d+ ", out), stage
    assert out.index("a check") < out.index("plain step")
    assert out.splitlines()[-1] == "1 of 1 checks passed"


def test_a_profile_that_fails_exits_1_after_the_checks(capsys, monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(kfac_matrix, "plan", lambda: [_check(0.0)])
    monkeypatch.setattr(kfac_profile, "profile_kfac", fail)
    status, out, err = run(capsys, "--profile")
    assert status == 1 and out.splitlines()[-1] == "1 of 1 checks passed"
    assert err == "gramian: verify kfac --profile: sequence length 128: OutOfMemoryError: CUDA out of memory.\n"


@pytest.mark.full
def test_clipping_has_a_row_per_check_and_a_row_per_layer_and_case_where_asked(capsys, monkeypatch):
    take_few(monkeypatch, "mlp", "tied gpt")
    status, out, err = run(capsys, "--verbose", target="clipping")
    assert (status, err) == (0, "")
    assert all(character == "\n" or character.isprintable() for character in out)
    rows = [line for line in out.splitlines() if re.search(r"\d\.\de-\d\d +[13]e-\d\d +ok *$", line)]
    assert len(rows) == 16 and "clipped sums, bfloat16" in out
    assert out.splitlines()[-1] == "16 of 16 checks passed"
    for case in FEW:
        part = out.split("tied gpt: clipped sums, float32 ")[1].split("tied gpt: ")[0]
        for layer in ("norms", "token_embedding.weight", "blocks.1.qkv.bias"):
            assert any(line.split()[0] == layer and case.label in line for line in part.splitlines() if line.strip())


@pytest.mark.full
def test_profile_adds_the_times_of_the_private_steps(capsys, monkeypatch):
    take_few(monkeypatch, "mlp")
    status, out, _ = run(capsys, "--profile", target="clipping")
    assert status == 0
    table = out.split("time of the private steps")[1]
    for phase in ("norm", "clip", "factors", "step", "noise"):
        assert re.search(rf"^ {phase} .* \d+ +[\d.]+ +[\d.]+ *$", table, re.MULTILINE), phase
    assert "0.weight" not in table
    _, out, _ = run(capsys, "--profile", "--verbose", target="clipping")
    assert "0.weight" in out.split("time of the private steps")[1]
    assert "time of" not in run(capsys, target="clipping")[1]


@pytest.mark.slow
@pytest.mark.full
def test_the_whole_matrix_of_clipping_passes_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "gramian", "verify", "clipping"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert re.fullmatch(r"(\d+) of \1 checks passed", done.stdout.splitlines()[-1])


# ---- several processes -----------------------------------------------------------------------------------------------


def torchrun(*options: str, breaks: str = "", models: tuple[str, ...] = ("mlp", "tied gpt"), cases: int = 7) -> Any:
    """The command on two processes, on a few models and cases; `breaks` is code that runs before it."""
    prepare = (
        "from functools import partial; from gramian.verify import clipping_matrix as m;"
        f"m.plan = partial(m.plan, models={models!r}, cases=m.CASES[::{cases}])\n"
    )
    return on_processes(["verify", "clipping", *options], prepare + breaks)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
def test_two_processes_agree_with_the_loop_and_the_first_alone_prints(option):
    done = torchrun(*option)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checks passed") == 1
    assert ("FSDP2 over 2" if option else "DDP over 2") in done.stdout
    assert all(f"process {rank} ends with 0" in done.stderr for rank in (0, 1))


NORMS_OF_ONE = """
from gramian.privacy.clipping import sample_norms
set_factors = sample_norms.set_factors
def broken(work):
    found = set_factors(work)
    work.factors = {0: work.factors[0] * 1.01 if rank == 1 else work.factors[0]}
    return found
sample_norms.set_factors = broken
"""
CRASH_OF_ONE = """
from gramian.privacy.clipping.clipping_rule import Clipping
parameter = Clipping.parameter
def broken(self, record):
    if rank == 1 and record.parameter.startswith("blocks"):
        raise RuntimeError("no luck")
    parameter(self, record)
Clipping.parameter = broken
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
def test_what_is_wrong_on_one_process_fails_on_all(option):
    done = torchrun(*option, breaks=NORMS_OF_ONE, models=("mlp",))
    assert done.returncode == 1
    assert all(f"process {rank} ends with 1" in done.stderr for rank in (0, 1))
    assert "FAILED mlp: clipped sums, float64: process 0: error" in done.stdout
    assert done.stderr.count("gramian: verify clipping:") == 1


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
def test_a_crash_of_one_process_ends_both_with_the_same_exit_code():
    done = torchrun(breaks=CRASH_OF_ONE, models=("tied gpt",))
    assert done.returncode == 1
    assert all(f"process {rank} ends with 1" in done.stderr for rank in (0, 1)), done.stderr
    assert re.search(r"FAILED tied gpt: clipped sums, float64: process [01]: .*", done.stdout)


# ---- a broken library ------------------------------------------------------------------------------------------------


def scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * by


def rolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Labels that belong to the position before."""
    return lambda *args, **kwargs: function(*args, **kwargs).roll(1, -1)


def unshifted(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda asked, shape: function(dataclasses.replace(asked, shifted=False), shape)


def weightless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tokens without a loss term count as well."""
    return lambda *args, **kwargs: None


def offset(function: Callable[..., Any]) -> Callable[..., Any]:
    """A bias column of 1.001."""
    return lambda matrix, first, weight: function(matrix, 1.001 * first, weight)


BUGS = {
    "the power of a block": (
        (Block, "power", partial(scaled, by=1.001)),
        "mlp: natural gradient, pi damping",
        "mlp: natural gradient, factored damping",
        "mlp: natural gradient, joint damping",
    ),
    "drawn labels": (
        (Softmax, "draw", rolled),
        "mlp: Monte Carlo frequencies",
        "gpt: Monte Carlo frequencies",
    ),
    "the causal shift": ((fisher_labels, "positions", unshifted), "gpt: Monte Carlo labels"),
    "tokens that count": ((TokenSelection, "_weights", weightless), "conv net: Monte Carlo labels"),
    "the bias": ((token_moments, "_augmented", offset), "conv net: factors A and G"),
    "the weight of the inputs": (
        (token_moments.TokenMoment, "stored_weight", partial(scaled, by=1.001)),
        "deep linear: factors A and G",
    ),
}


@pytest.mark.parametrize("bug", sample(list(BUGS), 1, case=lambda bug: None))
def test_a_broken_library_exits_1_and_the_check_is_named(bug, capsys, monkeypatch):
    (owner, name, broken), *failing = BUGS[bug]
    take_sample(monkeypatch, *dict.fromkeys(title.split(":")[0] for title in failing))
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    status, out, err = run(capsys)
    assert status == 1
    assert err.count("\n") == 1
    for title in failing:
        assert f"FAILED {title}: error" in out
    failed = re.findall(r"^FAILED ([^:]+: [^:]+):", out, re.MULTILINE)
    assert failed[0] in err
    total = len(kfac_matrix.plan())
    assert out.splitlines()[-1] == f"{total - len(failed)} of {total} checks passed"


def divided_by_the_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, noise, number, std, expected, *rest: function(self, noise, number, std, 3.0, *rest)


def too_large(function: Callable[..., Any]) -> Callable[..., Any]:
    """Factors of 1.001 times what they are."""

    def set_factors(work: Any) -> Any:
        found = function(work)
        work.factors = {group: factors_B * 1.001 for group, factors_B in work.factors.items()}
        return found

    return set_factors


def careless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Samples that are not finite are not left out."""

    def find_factors(work: Any) -> Any:
        found = function(work)
        work.finite_runs = None
        return found

    return find_factors


CLIPPING_BUGS = {
    "the factors": (sample_norms, "set_factors", too_large, "mlp: clipped sums, float32: error"),
    "the norm of an embedding": (
        Indexed,
        "squared_norms",
        partial(scaled, by=1.001),
        "text: clipped sums, float64: ",  # the row proof refuses it before there is an error to measure
    ),  # fmt: skip
    "the actual batch": (GradientSums, "release", divided_by_the_batch, "mlp: several backwards: error"),
    "a bad sample": (clipping_rule, "find_factors", careless, "mlp: a sample that is NaN: error nan"),
}


@pytest.mark.parametrize("bug", sample(list(CLIPPING_BUGS), 1, case=lambda bug: None))
def test_broken_clipping_exits_1_and_the_check_is_named(bug, capsys, monkeypatch):
    owner, name, broken, failing = CLIPPING_BUGS[bug]
    take_few(monkeypatch, failing.split(":")[0])
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    status, out, err = run(capsys, target="clipping")
    assert status == 1 and err.count("\n") == 1
    assert f"FAILED {failing}" in out
    assert err.startswith("gramian: verify clipping: ")


@pytest.mark.full
def test_a_check_that_crashes_has_failed_and_the_others_run_on(capsys, monkeypatch):
    take_sample(monkeypatch, "mlp", "deep linear")

    def crash(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no labels\ntoday")

    monkeypatch.setattr(Softmax, "draw", crash)
    status, out, err = run(capsys, "--verbose")
    assert status == 1
    assert out.splitlines()[-1] == "14 of 18 checks passed"
    assert "FAILED mlp: Monte Carlo labels: crashed: RuntimeError: no labels today" in out
    assert "mlp: Monte Carlo labels" in err and "and 1 more" in err


# ---- the frame -------------------------------------------------------------------------------------------------------


def _check(*errors: float) -> VerifyCheck:
    return VerifyCheck("model", "a check", 1e-3, lambda: [Comparison("layer", "case", error) for error in errors])


@pytest.mark.parametrize(
    ("errors", "passed"), [((0.0, 1e-3), True), ((2e-3,), False), ((float("nan"), 0.0), False), ((), False)]
)
def test_a_check_passes_if_it_compared_something_and_every_error_is_within_the_tolerance(errors, passed):
    (outcome,) = run_checks([_check(*errors)])
    assert outcome.passed == passed
    assert bool(outcome.problem) != passed


def test_collective_checks_end_at_the_first_crash():
    def crash() -> list[Comparison]:
        raise RuntimeError("gone")

    checks = [_check(0.0), VerifyCheck("model", "crashes", 1.0, crash), _check(0.0)]
    assert len(run_checks(checks)) == 3
    assert [outcome.passed for outcome in run_checks(checks, stop_at_crash=True)] == [True, False]


def test_nan_is_the_worst_error():
    outcome = VerifyOutcome(_check(), (Comparison("a", "", 1.0), Comparison("b", "", float("nan"))))
    assert outcome.worst is not None and outcome.worst.layer == "b"


def test_a_run_leaves_threads_and_random_state_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    run_checks(kfac_matrix.plan(torch.device("cpu"), ("mlp",), SAMPLE[:1]))
    run_checks(clipping_matrix.plan(ProcessGrid(0, 1, torch.device("cpu"), "one"), ("mlp",), FEW[:1]))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_are_relative_and_shapes_must_agree():
    assert relative_error(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == 1.0
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.zeros(2), torch.zeros(3))


def test_the_checks_between_devices_agree_with_themselves_on_one():
    bench = kfac_matrix._Bench(kfac_matrix.SUBJECTS["mlp"], torch.device("cpu"), SAMPLE)
    for measure in (bench.devices_float64, bench.devices_float32):
        assert {comparison.error for comparison in measure()} == {0.0}
    titles = [check.name for check in kfac_matrix.plan(torch.device("cuda"), ("mlp",), SAMPLE)]
    assert "CPU and CUDA, natural gradient" in titles and "CPU and CUDA, fp32 factors" in titles


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_matrix_passes_on_a_gpu(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, ""), out
    assert "CPU and CUDA" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("option", [[], ["--fsdp"]], ids=["one", "FSDP2"])
def test_the_whole_matrix_of_clipping_passes_on_a_gpu(option, capsys):
    status, out, err = run(capsys, *option, target="clipping")
    assert (status, err) == (0, ""), out
