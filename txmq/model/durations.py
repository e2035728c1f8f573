"""Durations that users give: seconds, or a timedelta. Inside they are microseconds."""

from __future__ import annotations

from datetime import timedelta
from typing import overload

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.units import SECOND

Duration = float | timedelta
MICROSECOND = timedelta(microseconds=1)
HINT = "give seconds or a timedelta, from 0 to less than ten years"


def micros_of(duration: Duration, name: str) -> int:
    """Return a duration in microseconds; `name` is that of the argument.

    Raises LocalProtocolError for what is negative, ten years or more, or no duration.
    """
    try:
        if isinstance(duration, timedelta):
            micros = duration // MICROSECOND
        else:
            micros = round(duration * SECOND)
    except (TypeError, ValueError, OverflowError):
        micros = -1
    if not 0 <= micros < limits.DURATION or isinstance(duration, bool):
        raise LocalProtocolError(f"{name} is {duration!r:.80}", hint=HINT)
    return micros


@overload
def seconds_of(duration: Duration, name: str) -> float: ...
@overload
def seconds_of(duration: Duration | None, name: str) -> float | None: ...
def seconds_of(duration: Duration | None, name: str) -> float | None:
    """Return a duration in seconds, None as it is. Raises as `micros_of` does."""
    if duration is None:
        return None
    micros_of(duration, name)
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
