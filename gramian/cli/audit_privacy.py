"""`gramian audit CONFIG.toml | RUN_DIR`: checks that can catch a private run, a lower bound on its ε, its signed receipt.

Sensitivity of the clipped sum, noise and draws of a short run, and one run on canaries.
`gramian audit --verify RECEIPT --key PUB [TARGET]` checks a receipt, offline.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramian.cli.command_errors import RunFailed, names_of_failed, refuse_torchrun
from gramian.cli.config_arguments import check_device, positive_integer
from gramian.cli.terminal import make_console, show
from gramian.core.errors import GramianError

if TYPE_CHECKING:
    from gramian.train.config.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian audit` to a parser."""
    add = parser.add_argument
    add("target", nargs="?", metavar="CONFIG.toml | RUN_DIR", help="a private config, or the folder of a private run; with "
        "--verify the folder of the run or of its exported model (default: that of the receipt, if it is a run)")  # fmt: skip
    add("overrides", nargs="*", metavar="section.key=value", help="with a config")
    add("--releases", type=positive_integer, metavar="N", help="of the short run (default: as many as the tests need)")
    add("--json", metavar="FILE", help="write the findings too")
    add("--verify", metavar="RECEIPT", help="check a receipt instead; needs --key")
    add("--key", metavar="PUB", help="public key of the run, 64 hexadecimal digits or a file with them")


def run(arguments: argparse.Namespace) -> int:
    """Audit a config or a run, or verify a receipt. Returns the exit code; raises RunFailed if a check failed."""
    refuse_torchrun("audit")
    if arguments.verify is not None:
        return _verify(arguments)
    if arguments.key is not None:
        raise GramianError("argument --key: is of a receipt; expected --verify RECEIPT beside it")
    if arguments.target is None:
        raise GramianError("argument TARGET: none given; expected CONFIG.toml or RUN_DIR, or --verify RECEIPT")
    file = None if arguments.json is None else Path(arguments.json).absolute()
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise GramianError(
            f"argument --json: {arguments.json} cannot be written; expected a file in an existing folder"
        )
    return _audit(arguments, file)


def _audit(arguments: argparse.Namespace, file: Path | None) -> int:
    from gramian.core.durable_files import replace_text
    from gramian.parallel.world import world
    from gramian.report.report_file import write_run_report
    from gramian.verify.private_audit.audit_checks import STATEMENT, as_json, audit
    from gramian.verify.private_audit.audited_run import open_run
    from gramian.verify.private_audit.receipt import FILE, make_receipt

    config, folder, noise = _target(arguments)
    console, findings = make_console(), []
    with world(config.run.device == "cpu", False) as grid:
        for finding in audit(open_run(config, grid, folder, noise), arguments.releases):
            findings.append(finding)
            show(console, f"{'ok' if finding.passed else 'FAILED'}  {finding.name}: {finding.says}")
    result = as_json(findings)
    show(console, STATEMENT)
    if file is not None:
        replace_text(file, json.dumps(result, indent=2) + "\n")
    if folder is not None:
        receipt = make_receipt(folder, result)
        replace_text(folder / FILE, json.dumps(receipt, indent=2) + "\n")
        write_run_report(folder, private=True)
        show(console, f"receipt: {folder / FILE}", f"public key: {receipt['public_key']}", receipt["proves"])
    failed = [finding.name for finding in findings if not finding.passed]
    if failed:
        raise RunFailed(f"audit: {names_of_failed(failed, len(findings))}")
    return 0


def _target(arguments: argparse.Namespace) -> tuple[Config, Path | None, float | None]:
    """Config, run folder (None: there is none), and noise multiplier of that run, from its record."""
    from gramian.train.config.config import load_config
    from gramian.train.state.saved_run import find_checkpoint

    path = Path(arguments.target)
    if not path.is_dir():
        config = load_config(path, arguments.overrides)
        check_device(config)
        return config, None, None
    if arguments.overrides:
        raise GramianError(f"{arguments.overrides[0]!r}: a run has its own config; expected no override with RUN_DIR")
    config, _ = find_checkpoint(path, "argument RUN_DIR")
    check_device(config)
    noise: Any = None
    if config.privacy is not None:
        try:
            noise = json.loads((path / "record.json").read_text(encoding="utf-8"))["privacy"]["noise_multiplier"]
        except (OSError, ValueError, LookupError, TypeError):
            noise = None
        if not isinstance(noise, int | float):
            raise GramianError(
                f"argument RUN_DIR: {path / 'record.json'} cannot be read; expected that of a private run"
            )
    return config, path, noise


def _verify(arguments: argparse.Namespace) -> int:
    from gramian.train.state.saved_run import is_run
    from gramian.verify.private_audit.receipt import difference, failures, read_receipt

    for name in ("overrides", "releases", "json"):
        if getattr(arguments, name):
            raise GramianError(f"argument {name}: is of an audit; expected it without --verify")
    if arguments.key is None:
        raise GramianError("argument --key: none given; expected the public key of the run beside --verify")
    path = Path(arguments.verify)
    receipt = read_receipt(path)
    folder = Path(arguments.target) if arguments.target is not None else path.parent if is_run(path.parent) else None
    if folder is not None and not folder.is_dir():
        raise GramianError(
            f"argument TARGET: {folder} is not a folder; expected that of the run or of its exported model"
        )
    if problem := difference(receipt, _public_key(arguments.key), folder):
        raise RunFailed(f"{path}: {problem}")
    looked = "no weights and no ledger were looked at" if folder is None else f"{folder} has its weights"
    show(make_console(), f"{path}: as it was signed; {looked}", str(receipt.get("proves", "")))
    if failed := failures(receipt):
        show(make_console(), f"it says itself: {'; '.join(map(str, failed))}")
    return 0


def _public_key(given: str) -> str:
    """64 hexadecimal digits, given as such or in a file."""
    try:
        text = Path(given).read_text(encoding="utf-8") if len(given) != 64 or Path(given).is_file() else given
    except (OSError, ValueError):
        text = given
    return text.strip().lower()
