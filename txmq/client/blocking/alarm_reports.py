"""Alarms of programs that work beside a broker, told to it, so that `txmq alarms` and
the metrics have them, too.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

MOST_TEXT = 1_000  # characters that a broker takes


class Alarm(NamedTuple):
    """A condition that holds; the names are listed in `txmq.wire.calls_alarms`."""

    name: str
    severity: str
    text: str
    action: str


def source_of(what: str) -> str:
    """A name for this process, under which it tells what it has to tell."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    return f"{what}-{host[:64]}-{os.getpid()}"


def report(call: Callable[..., object], source: str, alarms: Iterable[Alarm], for_s: float) -> None:
    """Tells a broker all that holds just now, by its `call` for control calls. Raises
    TxmqError.
    """
    told = [alarm._replace(text=alarm.text[:MOST_TEXT])._asdict() for alarm in alarms]
    call("alarms.report", source=source, alarms=told, for_s=min(for_s, 3_600.0))
