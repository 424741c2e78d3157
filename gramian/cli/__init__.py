"""The command line: a table of commands, exit codes and one-line errors.

Exit codes: 0 success, 1 the check or the run failed, 2 bad input. Failures and bad input are one line on standard error.
"""

import argparse
import errno
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from gramian.cli.command_errors import RunFailed
from gramian.core.errors import GramianError
from gramian.core.version import VERSION

COMMANDS = {
    "demo": ("demo.demo", "a teacher, its cache, a distilled student and its twin without a teacher, compared"),
    "init": ("init", "write a commented run.toml for your text, your model folder or the embedded corpus"),
    "train": ("train", "train a model as a config says, or resume its run"),
    "cache": ("cache", "write a teacher's signal to disk"),
    "doctor": ("doctor", "examine a run before it starts, or what of a model folder is exact"),
    "eval": ("eval", "perplexity of a run's model, or a text by it"),
    "export": ("export", "write a run's best model as a folder that other programs load"),
    "report": ("report", "one page of curves and tables from the folders of runs"),
    "curvature": ("curvature.curvature", "capacity metrics and spectra of a model's curvature, layer by layer"),
    "influence": ("influence", "which passages of its training text made a model say this"),
    "plan": ("plan", "whether a run fits into memory, and how it is spread over GPUs"),
    "verify": ("verify", "prove on this machine that the library computes what it promises"),
    "audit": ("audit_privacy", "try to catch a private run, and sign or verify its receipt"),
    "profile": ("profile.profile", "measure what a feature costs in time and memory"),
}
"""{command: (module below `gramian.cli`, line in the help)}. Only the module of the chosen command is imported. It defines
`add_arguments(parser)` and `run(arguments)`, which returns the exit code; its docstring is the description in the help.
"""

OLD_FLAGS = {
    "--enable-profiling": "--profile (verify), gramian profile, GRAMIAN_PROFILE=1 gramian train, or engine.stopwatch",
    "--gpus": "torchrun --nproc-per-node=N -m gramian ..., or --gpus of gramian plan",
    "--use-flash": "privacy.clipping=auto, which needs no flag: every way of clipping is exact",
    "--use-fsdp": "--fsdp (verify, profile), or parallel.strategy=fsdp2 (train)",
}
"""{flag of the programs that these ideas come from: what it is here}."""
REWORDED = {
    r"invalid choice: (.*) \(choose from (.*)\)": r"\1 is unknown; expected \2",
    r"invalid int value: (.*)": r"got \1; expected an integer",
    r"invalid float value: (.*)": r"got \1; expected a number",
}
"""{pattern in a message of argparse: what it is here}."""
FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors of a file that are no mistake of the command line: the disk is broken or full."""
LONGEST_WORD = 300
"""Number of characters from which on a word of an error, such as a value that it quotes, is shortened."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises `GramianError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing == message:
            for theirs, ours in REWORDED.items():
                message = re.sub(theirs, ours, message)
            raise GramianError(message)
        first = missing.partition(", ")[0]  # argparse also names those that may be left out
        raise GramianError(f"{first}: none given; expected {self.format_usage().removeprefix('usage: ')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as in `main(["train", "run.toml", "run.steps=100"])`.

    Args:
        argv: Arguments after the program name; None: those of the process.

    Returns:
        The exit code: 0 success, 1 the check or the run failed, 2 bad input.
    """
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        status: int = arguments.run(arguments)
        return status
    except GramianError as problem:
        return _complain(problem, 2)
    except RunFailed as problem:
        return _complain(problem, 1)
    except OSError as problem:
        line = f"{problem.filename or 'output'}: {problem.strerror or problem}"
        return _complain(f"{line}; expected a path that can be read and written", 1 if problem.errno in FAULTS else 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse `argv`; the result's `run` is the command, a function from the arguments to the exit code."""
    for before, word in zip(["", *argv], argv, strict=False):
        if "\0" in word or word.encode(errors="replace").decode() != word:
            name = before if before.startswith("--") else ascii(word)
            raise GramianError(f"argument {name}: is not text; expected UTF-8 without zero bytes")
    description = "Curvature, privacy and health of training from one capture."
    parser = _Parser(prog="gramian", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gramian {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=_Parser)
    chosen = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        subparser = commands.add_parser(name, help=help_line, allow_abbrev=False)
        if name == chosen:
            command = import_module(f"gramian.cli.{module}")
            subparser.description = command.__doc__
            subparser.set_defaults(run=command.run)
            command.add_arguments(subparser)

    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command is None:
        given = f"unknown {' '.join(unknown)!r}" if unknown else "none given"
        raise GramianError(f"command: {given}; expected {', '.join(COMMANDS)}")
    if hasattr(arguments, "overrides") and all("=" in part and not part.startswith("-") for part in unknown):
        arguments.overrides, unknown = [*arguments.overrides, *unknown], []  # argparse accepts none after an option
    for flag in unknown:
        name = flag.partition("=")[0].replace("_", "-")
        if name.startswith("--") and (here := OLD_FLAGS.get(name) or _config_key(name, arguments)):
            raise GramianError(f"{flag}: is unknown here; expected {here}")
    if unknown:
        usage = commands.choices[arguments.command].format_usage().removeprefix("usage: ")
        raise GramianError(f"{arguments.command}: unknown {' '.join(unknown)!r}; expected {usage}")
    return arguments


def _config_key(flag: str, arguments: argparse.Namespace) -> str:
    """The override that a flag such as --eval-interval is, of a command that accepts overrides; else ""."""
    if not hasattr(arguments, "overrides"):
        return ""
    from gramian.train.config.config import override_of

    return override_of(flag.removeprefix("--").replace("-", "_"))


def _complain(problem: object, status: int) -> int:
    """Print a problem as one line, with control characters escaped and very long words shortened; returns `status`."""
    line = " ".join(str(problem).split())
    line = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:100]}…{word[0][-20:]}", line)
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)
    print(f"gramian: {shown}", file=sys.stderr)
    return status
