"""The result of one check."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Health(StrEnum):
    """How serious it is."""

    OK = "ok"
    WARNING = "warning"  # it works, and is likely to hurt
    FAILURE = "failure"  # it does not work, or loses what was promised


class Finding(NamedTuple):
    """What was looked at, how it is, what was found, and what to do about it."""

    check: str
    health: Health
    found: str
    advice: str = ""


def judged(check: str, found: str, *, failed: bool, advice: str, fatal: bool = True) -> Finding:
    """Return a finding that is fine unless `failed`; then it has the advice."""
    if not failed:
        return Finding(check, Health.OK, found)
    return Finding(check, Health.FAILURE if fatal else Health.WARNING, found, advice)
