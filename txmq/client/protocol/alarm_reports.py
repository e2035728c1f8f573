"""Alarms that clients and programs beside a broker report to it.

`txmq alarms` and the broker's metrics then show them, too.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MAX_TEXT = 1_000  # characters that a broker accepts
MAX_DURATION_S = 3_600.0
MIN_DURATION_S = 30.0  # of alarms that are reported again while they last


class AlarmReport(NamedTuple):
    """A condition that holds now. `txmq.wire.calls.alarms` lists the names."""

    name: str
    severity: str
    text: str
    action: str


def alarm_source(role: str) -> str:
    """Return the name under which this process reports its alarms."""
    return f"{lasting_source(role)}-{os.getpid()}"


def lasting_source(role: str) -> str:
    """Return the name of a source whose alarms the next process on this host
    replaces.
    """
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    return f"{role}-{host[:64]}"


def report_alarms(
    call: Callable[..., object], source: str, alarms: Iterable[AlarmReport], for_s: float
) -> None:
    """Report all current alarms of a source, by a client's control call.

    They last for `for_s` seconds, unless reported again. Raises TxmqError.
    """
    call("alarms.report", **report_args(source, alarms, for_s))


def report_args(source: str, alarms: Iterable[AlarmReport], for_s: float) -> dict[str, Any]:
    """Return the arguments of that call."""
    reported = [alarm._replace(text=alarm.text[:MAX_TEXT])._asdict() for alarm in alarms]
    return {"source": source, "alarms": reported, "for_s": min(for_s, MAX_DURATION_S)}
