"""Tables and lines that `gramian verify` prints: a row per check, per comparison, and per phase of private steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed, names_of_failed
from gramian.cli.terminal import add_group, make_table, show, verdict_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gramian.verify.checks import VerifyCheck, VerifyOutcome


def report_checks(
    outcomes: Sequence[VerifyOutcome], title: str, legend: str, verbose: bool
) -> Iterator[RenderableType]:
    """Tables of the checks' outcomes, with notes on the approximations in use; `verbose` adds a row per comparison."""
    if verbose:
        yield from map(_comparison_table, outcomes)
    yield title
    yield _check_table(outcomes)
    yield legend
    declared: dict[str, set[str]] = {}
    for outcome in outcomes:
        for seen in outcome.comparisons:
            if seen.declared:
                declared.setdefault(seen.declared, set()).add(f"{outcome.check.model} {seen.layer}")
    for name, places in declared.items():
        yield f"note: {name}, as kfac.record() says and as was compared, in: {', '.join(sorted(places))}"


def conclude(
    console: Console, target: str, failed: Mapping[str, str], outcomes: Sequence[VerifyOutcome], total: int
) -> None:
    """Print the checks that failed on any process, {title: what is wrong}, and how many of the `total` checks passed here.

    After a crash of a collective check the rest did not run.

    Raises:
        RunFailed: if a check failed.
    """
    for title, problem in failed.items():
        console.print(f"FAILED {title}: {problem}", markup=False, soft_wrap=True, style="red")
    passed = sum(outcome.check.title not in failed for outcome in outcomes)
    waiting = total - len(outcomes)
    show(console, f"{passed} of {total} checks passed{f', {waiting} did not run' if waiting else ''}")
    if failed:
        raise RunFailed(f"verify {target}: {names_of_failed(list(failed), total)}")


def _check_table(outcomes: Sequence[VerifyOutcome]) -> RenderableType:
    """Table of the checks: a row per check, with its largest error."""
    table = make_table("model", "check", ">comparisons", ">worst error", ">tolerance", "verdict")
    for model, group in groupby(outcomes, lambda outcome: outcome.check.model):
        rows = [
            (
                outcome.check.name,
                f"{len(outcome.comparisons):,}",
                "-" if outcome.worst is None else _error(outcome.worst.error, outcome.check.unit),
                _tolerance(outcome.check),
                verdict_text(outcome.passed),
            )
            for outcome in group
        ]
        add_group(table, model, rows)
    return table


def _comparison_table(outcome: VerifyOutcome) -> RenderableType:
    """Table of one check: a row per layer and case that was compared."""
    from rich.text import Text

    check = outcome.check
    table = make_table("layer", "case", ">error", "verdict", title=f"{check.title} (tolerance {_tolerance(check)})")
    for seen in outcome.comparisons:
        case = f"{seen.case} ({seen.declared})" if seen.declared else seen.case
        table.add_row(seen.layer, case, _error(seen.error, check.unit), verdict_text(seen.error <= check.tolerance))
    if outcome.crash:
        table.add_row("", Text(f"crashed: {outcome.crash}"), "-", verdict_text(False))
    return table


def time_table(report: Sequence[Mapping[str, Any]], verbose: bool, title: str) -> RenderableType:
    """Table of mean times of steps: a row per phase and algorithm, with `verbose` also per parameter."""
    headings = ("phase", *["parameter"] * verbose, "way", ">calls", ">total ms", ">ms a call")
    table = make_table(*headings, title=title)
    sums: dict[tuple[str, ...], tuple[int, float]] = {}
    for line in report:
        key = (line["phase"], *[line["what"]] * verbose, line["way"])
        calls, total = sums.get(key, (0, 0.0))
        sums[key] = calls + line["calls"], total + line["calls"] * line["milliseconds"]
    for key, (calls, total) in sorted(sums.items()):
        table.add_row(*key, f"{calls:,}", f"{total:,.1f}", f"{total / calls:.3f}")
    return table


def _error(error: float, unit: str) -> str:
    return f"{error:.2f} {unit}" if unit else f"{error:.1e}"


def _tolerance(check: VerifyCheck) -> str:
    return f"{check.tolerance:g} {check.unit}" if check.unit else f"{check.tolerance:.0e}"
