"""The checks of `gramian audit`, in order, and their result as JSON values."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gramian.core.errors import GramianError
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE, AuditFinding
from gramian.verify.private_audit.audited_run import AuditedRun
from gramian.verify.private_audit.canaries import check_canaries
from gramian.verify.private_audit.releases import check_releases
from gramian.verify.private_audit.sensitivity import check_sensitivity

STATEMENT = (
    "These are checks of this code with this config on this machine. A failed one shows that ε does not hold; passed ones do "
    "not prove that it does. A lower bound far below the accounted ε says that these guesses were weak, and nothing more."
)


def audit(run: AuditedRun, releases: int | None = None) -> Iterator[AuditFinding]:
    """Yield what each check of a run finds; one that raises has failed. `releases` None: as many as the tests need."""

    def canaries() -> list[AuditFinding]:
        privacy, steps = run.privacy, run.config.run.steps
        arguments = (
            run.noise_multiplier,
            privacy.max_grad_norm,
            run.sample_rate,
            steps,
            privacy.delta,
            privacy.accountant,
        )
        return [check_canaries(*arguments, noise=privacy.noise, bands=privacy.bands)]

    checks: tuple[tuple[str, Callable[[], Sequence[AuditFinding]]], ...] = (
        ("sensitivity", lambda: [check_sensitivity(run)]),
        ("releases", lambda: check_releases(run, releases)),
        ("canaries", canaries),
    )
    for name, check in checks:
        try:
            yield from check()
        except GramianError as problem:  # what private training refuses is not as accounted
            yield AuditFinding(name, False, f"refused: {problem}", {})


def as_json(findings: Sequence[AuditFinding]) -> dict[str, Any]:
    """The result of an audit as JSON values."""
    return {
        "passed": all(finding.passed for finding in findings),
        "significance": SIGNIFICANCE,
        "statement": STATEMENT,
        "findings": {finding.name: finding.as_json() for finding in findings},
    }
