"""`gramian demo`: the whole pipeline in seconds, what it leaves behind, and what ends it."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gramian.cli import main
from gramian.cli.demo import demo_plan as plans
from gramian.cli.demo import pipeline
from gramian.cli.demo.demo_result import FILE, Result, read_result
from gramian.data import embedded_corpus
from gramian.train.doctor.check import Check
from tests.cli.small_demo import small

RUNS = ("teacher", "ce-only", "distilled", "private")
pytestmark = pytest.mark.xdist_group("demo")  # one finished demo for all


@dataclass(frozen=True)
class Done:
    """A demo that came to its end."""

    out: Path
    printed: str

    @property
    def result(self) -> Result:
        found = read_result(self.out)
        assert found is not None
        return found


@contextmanager
def quick() -> Iterator[None]:
    """A demo of seconds; how the process computes is put back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "DEFAULT", small())
        yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.fixture(autouse=True)
def always_quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One, for all tests that only look."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    printed, complaints = io.StringIO(), io.StringIO()
    with quick(), redirect_stdout(printed), redirect_stderr(complaints):
        status = main(["demo", "--out", str(out)])
    assert (status, complaints.getvalue()) == (0, "")
    return Done(out, printed.getvalue())


def _child(call: str, before: str = "") -> str:
    """A process whose demo is the small one; it exits with what the call returns."""
    return (
        "import sys; from gramian.cli import main; from gramian.cli.demo import demo_plan; "
        "from tests.cli.small_demo import small\n"
        f"demo_plan.DEFAULT = small()\n{before}\nsys.exit({call})"
    )


def scores(result: Result) -> list[object]:
    """Everything that the seed determines: not the private student, whose noise is secret."""
    return [row.score for row in result.rows if row != result.private] + [
        result.samples,
        result.curvature.effective_dimension,
    ]


# ---- a demo that came to its end -------------------------------------------------------------------------------------------


def test_every_stage_is_shown_and_the_figures_come_last(done: Done) -> None:
    assert all(character == "\n" or character.isprintable() for character in done.printed)
    stages = len(pipeline.STAGE_NAMES)
    places = [done.printed.index(f"[{number}/{stages}]") for number in range(1, stages + 1)]
    places += [done.printed.index(text) for text in ("overfit", "cache = teacher", "first distance")]
    table = done.printed.index("agree corr.")
    assert max(places) < done.printed.index("teacher writes") < table
    assert table < done.printed.index("one seed:") < done.printed.index("try next:")
    figures, result = done.printed.splitlines()[-5:], done.result
    assert re.fullmatch(
        rf"distilled  loss {result.distilled.score.loss:.3f} nats .*{result.alone.score.loss:.3f}.*", figures[0]
    )
    assert re.fullmatch(
        rf"private    loss {result.private.score.loss:.3f} at ε = {result.privacy.epsilon:.2f}, .*", figures[1]
    )
    assert re.fullmatch(rf"curvature .*{result.curvature.largest_eigenvalue:.3g}.*", figures[2])
    assert figures[4] == f"page:    {done.out / 'report.html'} (open it in a browser)"


def test_the_private_student_spends_its_target_and_the_teacher_has_its_curvature(done: Done) -> None:
    result, target = done.result, small().privacy.target_epsilon
    assert target is not None
    assert result.privacy.valid and 0.9 * target < result.privacy.epsilon <= target
    found = json.loads((done.out / "teacher" / "curvature" / "curvature.json").read_text())
    assert (
        found["complete"]
        and found["kfac"]["metrics"]["model"]["effective_dimension"] == result.curvature.effective_dimension
    )
    assert found["ggn"]["extremes"]["largest"] == result.curvature.largest_eigenvalue
    assert list((done.out / "teacher" / "curvature").glob("*.png"))
    page = (done.out / "report.html").read_text(encoding="utf-8")
    assert "effective rank" in page.lower() and "ε" in page


def test_the_folder_holds_four_runs_a_cache_the_numbers_and_a_page(done: Done) -> None:
    assert {path.name for path in done.out.iterdir()} == {*RUNS, "teacher-cache", FILE, "report.html"}
    for name in RUNS:
        held = {path.name for path in (done.out / name).iterdir()}
        assert held >= {"config.toml", "record.json", "metrics.jsonl", "events.jsonl", "checkpoints", "report.html"}
    json.loads((done.out / FILE).read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_the_table_says_what_the_runs_say(done: Done) -> None:
    for row in done.result.rows:
        record = json.loads((Path(row.folder) / "record.json").read_text())
        lines = [json.loads(line) for line in (Path(row.folder) / "metrics.jsonl").read_text().splitlines()]
        assert row.parameters == record["parameters"]
        assert row.steps == lines[-1]["step"]
        assert row.seconds == max(line["time"].get("elapsed", 0.0) for line in lines)
        cells = (row.name, f"{row.parameters:,}", row.steps, f"{row.seconds:.1f}", f"{row.score.loss:.4f}")
        assert re.search(r"\s+".join(re.escape(str(cell)) for cell in cells), done.printed), row.name


def test_the_table_says_what_gramian_eval_says(done: Done, tmp_path: Path) -> None:
    told, windows = tmp_path / "eval.json", str(small().scored_windows)
    for row in done.result.rows:
        assert main(["eval", row.folder, "--windows", windows, "--json", str(told)]) == 0
        plain = json.loads(told.read_text())["results"][0]
        assert plain["tokens"] == row.score.tokens
        assert row.score.loss == pytest.approx(plain["loss"], rel=1e-5)
        assert row.score.perplexity == pytest.approx(plain["perplexity"], rel=1e-5)


def test_only_the_distilled_student_was_taught(done: Done) -> None:
    for name in RUNS:
        lines = (done.out / name / "metrics.jsonl").read_text().splitlines()
        assert any("agreement" in json.loads(line) for line in lines) == (name == "distilled")
    assert done.result.distilled.score != done.result.alone.score


def test_what_to_try_next_works(done: Done, tmp_path: Path) -> None:
    lines = done.printed[done.printed.index("try next:") :].splitlines()[1:4]
    commands = [shlex.split(line)[shlex.split(line).index("gramian") :] for line in lines]
    shutil.copytree(done.out, tmp_path / "copy")
    for command in commands:
        moved = [part.replace(f"run.folder={done.out}", f"run.folder={tmp_path}") for part in command]
        assert main(moved[1:]) == 0


def test_a_finished_demo_is_shown_again_and_not_run(
    done: Done, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "run_demo", lambda *given: pytest.fail("it ran"))
    assert main(["demo", "--out", str(done.out)]) == 0
    shown = capsys.readouterr().out
    assert "finished demo" in shown
    assert shown.splitlines()[1:] == done.printed[done.printed.index("╭─ teacher writes") :].splitlines()


def test_a_demo_of_other_settings_is_refused(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(done.out), "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--out" in error and "--seed" in error


# ---- what ends one ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_ctrl_c_leaves_with_one_line_and_the_same_command_goes_on(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal in the middle of the teacher; the demo that goes on finds the numbers of one that was never ended."""
    out = tmp_path / "out"
    before = """
import os, signal
from gramian.cli.demo import pipeline
class Ended(pipeline.Trainer):
    def _attempt(self, flag):
        if self.step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        super()._attempt(flag)
pipeline.Trainer = Ended
"""
    ended = subprocess.run(
        [sys.executable, "-c", _child(f"main(['demo', '--out', {str(out)!r}])", before)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 1
    assert re.fullmatch(
        r"gramian: demo: teacher: interrupted at step \d+ of 24; the same command goes on from there\n", ended.stderr
    )
    assert not (out / FILE).exists()
    assert main(["demo", "--out", str(out)]) == 0
    capsys.readouterr()
    steps = [json.loads(line)["step"] for line in (out / "teacher" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    events = [json.loads(line)["event"] for line in (out / "teacher" / "events.jsonl").read_text().splitlines()]
    assert "interrupted" in events and "resumed" in events
    assert scores(Done(out, "").result) == scores(done.result)


def test_an_interrupt_outside_training_exits_1_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object, **named: object) -> list[Check]:
        raise KeyboardInterrupt  # as Ctrl-C does; a job in the background of a shell would ignore the signal

    monkeypatch.setattr(pipeline, "examine", interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "gramian: demo: interrupted; the same command goes on from there\n"


def test_a_failed_check_exits_1_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = Check("initial loss", "9 nat", "2% of 5.5", False, "look at the head")
    monkeypatch.setattr(pipeline, "examine", lambda *given, **named: [sick])
    assert main(["demo", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in ("initial loss", "9 nat", "look at the head"):
        assert part in error
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_run_that_its_guard_stops_exits_1_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gramian.train.loop.trainer import Ended, Trainer

    monkeypatch.setattr(pipeline, "examine", lambda *given, **named: [Check("targets", "0", "0", True)])
    monkeypatch.setattr(Trainer, "run", lambda self: Ended(7, "stopped", "loss is nan"))
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "gramian: demo: teacher: stopped at step 7 of 24: loss is nan\n"


# ---- bad input -------------------------------------------------------------------------------------------------------------


def test_out_that_is_a_file_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "file"
    target.touch()
    for out in (target, target / "below", "zero\0byte"):
        assert main(["demo", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "--out" in captured.err and ("expected a folder" in captured.err or "without zero bytes" in captured.err)


def test_a_folder_in_use_and_one_of_another_seed_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gramian.train.state.run_folder import RunFolder

    runs = plans.runs_of(small(), tmp_path)
    with RunFolder(runs.distilled) as folder:
        assert main(["demo", "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--out" in error and "in use" in error
        (folder.path / "metrics.jsonl").write_text("{}\n")
    assert main(["demo", "--out", str(tmp_path), "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--out" in error and "run.seed is 0 there, 1 here" in error


def test_several_processes_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_a_missing_standard_library_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_corpus.sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "python.zip" in captured.err
    assert "an unpacked standard library" in captured.err
