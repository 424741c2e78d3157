"""What one check of an audit found, in words and in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIGNIFICANCE = 1e-4
"""A p-value below this fails a test; 1 − this is the confidence of the lower bound on ε."""


@dataclass(frozen=True)
class AuditFinding:
    """The result of one check of an audit."""

    name: str
    passed: bool
    says: str
    """The result in plain words."""
    facts: Mapping[str, Any]
    """Its numbers, as JSON values."""
    on_private_data: bool = False
    """Whether it is computed on records of the run without noise, so that ε does not cover its publication."""

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON values, labelled "not covered by ε" if it is computed on private records."""
        label = {"label": "not covered by ε"} if self.on_private_data else {}
        return {"passed": self.passed, "says": self.says, **self.facts, **label}
