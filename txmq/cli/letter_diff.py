"""Differences between two versions of a message, for terminals."""

from __future__ import annotations

from txmq.cli.output import escape_controls
from txmq.model import message_diff
from txmq.model.message_diff import Version

__all__ = ["Version", "diff"]


def diff(before: Version, after: Version, names: tuple[str, str]) -> list[str]:
    """Return the lines of a diff; control characters are escaped."""
    return [escape_controls(line) for line in message_diff.diff(before, after, names)]
