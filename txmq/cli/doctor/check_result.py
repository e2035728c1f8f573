"""The result of one check."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Health(StrEnum):
    """Seriousness of what a check has found."""

    OK = "ok"
    WARNING = "warning"  # it works, and may cause an outage
    FAILURE = "failure"  # it does not work, or could lose messages


class CheckResult(NamedTuple):
    """Result of one check: its subject, its health, the facts, and what to do."""

    check: str
    health: Health
    found: str
    advice: str = ""


def judged(check: str, found: str, *, failed: bool, advice: str, fatal: bool = True) -> CheckResult:
    """Return a result that is OK unless `failed`; then it has the advice."""
    if not failed:
        return CheckResult(check, Health.OK, found)
    return CheckResult(check, Health.FAILURE if fatal else Health.WARNING, found, advice)
