"""An alarm, as operators see it."""

from __future__ import annotations

from typing import NamedTuple

TOLD_APART = ("group", "source")  # what alarms of one name may be about at once


class Alarm(NamedTuple):
    """An alarm that is raised, `since` microseconds of the epoch."""

    name: str
    severity: str  # "critical": something stands still or is wrong; "warning": it may become so
    since: int
    text: str
    action: str
    about: str = ""  # "group:NAME", "plan:NAME", "tx:TOKEN", "source:NAME" of a report

    @property
    def told_apart(self) -> dict[str, str]:
        """What it is about, where alarms of its name may be about several at once."""
        kind, _colon, name = self.about.partition(":")
        return {kind: name} if kind in TOLD_APART else {}

    @property
    def group(self) -> str:
        """The group that it is about, "" = it is about something else."""
        return self.told_apart.get("group", "")

    @property
    def key(self) -> str:
        """The name under which receivers know it. One of the broker's own that is not
        about a group stays the same, whatever it is about by now.
        """
        return "/".join((self.name, *self.told_apart.values()))
