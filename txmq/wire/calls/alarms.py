"""Arguments of the call that reports alarms to the broker (docs/FORMATS.md 2.3).

The reporters are XA recovery, relays, and consumers with an inbox or a local store.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, StringConstraints

from txmq.wire.calls.arguments import Args, Name

ReportedName = Literal[
    "xa.lost_branch",
    "xa.needs_operator",
    "xa.orphan",
    "xa.unreachable",
    "relay.lost",
    "relay.unreserved",
    "relay.retained",
    "relay.lag",
    "relay.missing",
    "relay.unfit",
    "relay.rewound",
    "relay.missed",
    "relay.restored",
    "relay.unreachable",
    "relay.stopped",
    "inbox.lost",
    "store.damaged",
]
REPORTED_NAMES: tuple[ReportedName, ...] = get_args(ReportedName)
AlarmText = Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


class ReportedAlarm(Args):
    """One condition that holds."""

    name: ReportedName
    severity: Literal["critical", "warning"]
    text: AlarmText
    action: AlarmText


class AlarmsReport(Args):
    """All alarms of `source`, in place of those it reported before; none = all is well.

    The broker drops them after `for_s` seconds without another report of the source.
    """

    source: Name
    alarms: Annotated[tuple[ReportedAlarm, ...], Field(max_length=50)]
    for_s: Annotated[float, Field(gt=0, le=3_600)]
