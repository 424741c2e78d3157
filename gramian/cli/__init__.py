"""The command line: parsing, exit codes and one-line errors; each command lives in its own file.

Exit codes: 0 done, 1 the check or the run failed, 2 bad input. Failures and bad input are one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from gramian.core.errors import GramianError
from gramian.core.version import VERSION


class RunFailed(Exception):
    """A run or check that did not succeed; the message says why."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises `GramianError` in place of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise GramianError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program name; default: those of the process.

    Returns:
        The exit code.
    """
    try:
        arguments = _parse(argv)
        status: int = arguments.run(arguments)
        return status
    except GramianError as problem:
        return _complain(problem, 2)
    except RunFailed as problem:
        return _complain(problem, 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)


def refuse_unavailable(
    usage: str, target: str | None, targets: Sequence[str], later: Sequence[str], options: Mapping[str, object]
) -> None:
    """Refuse a target or an option that does not exist, or not yet.

    Args:
        usage: the command as it works today, such as "gramian verify kfac [--verbose]".
        target: what the user asked for.
        targets: what works.
        later: targets that will.
        options: {option that will work: its value}; None and False: not given.

    Raises:
        GramianError: naming what was given and what would be accepted.
    """
    accepted = f"accepted: {', '.join(targets)}"
    if target is None:
        raise GramianError(f"argument TARGET: none given; {accepted}")
    if target not in targets:
        why = "is not available yet" if target in later else "is unknown"
        raise GramianError(f"argument TARGET: {target!r} {why}; {accepted}")
    for name, value in options.items():
        if value is not None and value is not False:
            given = "" if value is True else f" {value!r}"
            raise GramianError(f"argument {name}:{given} is not available yet; accepted: {usage}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv`; the result's `run` is the command, a function from the arguments to the exit code."""
    from gramian.cli import cache, curvature, doctor, eval, plan, train, verify
    from gramian.cli.demo import demo
    from gramian.cli.profile import profile

    description = "Curvature, privacy and health of training from one capture."
    parser = _Parser(prog="gramian", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gramian {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=_Parser)
    for command in (demo, train, cache, doctor, eval, curvature, plan, verify, profile):
        command.add_parser(commands)

    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command is None:
        raise GramianError(f"command: none given; accepted: {', '.join(commands.choices)}")
    if hasattr(arguments, "overrides") and all("=" in word and not word.startswith("-") for word in unknown):
        arguments.overrides, unknown = [*arguments.overrides, *unknown], []  # argparse takes none behind an option
    if unknown:
        usage = commands.choices[arguments.command].format_usage().removeprefix("usage: ")
        raise GramianError(f"{arguments.command}: unknown {' '.join(unknown)!r}; accepted: {usage}")
    return arguments


def _complain(problem: object, status: int) -> int:
    print(f"gramian: {' '.join(str(problem).split())}", file=sys.stderr)
    return status
