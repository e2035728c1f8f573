"""Alarms that others than the broker raise: recovery of XA, relays, consumers with an
inbox (docs/FORMATS.md 2.3).
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, StringConstraints

from txmq.wire.args import Args, Name

ReportedName = Literal[
    "xa.needs_operator",
    "xa.orphan",
    "xa.unreachable",
    "relay.lost",
    "relay.unreserved",
    "relay.retained",
    "relay.lag",
    "inbox.lost",
]
REPORTED_NAMES: tuple[ReportedName, ...] = get_args(ReportedName)
Told = Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


class ReportedAlarm(Args):
    """One condition that holds."""

    name: ReportedName
    severity: Literal["critical", "warning"]
    text: Told
    action: Told


class AlarmsReport(Args):
    """Everything that `source` has to tell just now, in place of what it told before;
    none = all is well.

    It is forgotten after `for_s` seconds, unless the source is heard of again.
    """

    source: Name
    alarms: Annotated[tuple[ReportedAlarm, ...], Field(max_length=50)]
    for_s: Annotated[float, Field(gt=0, le=3_600)]
