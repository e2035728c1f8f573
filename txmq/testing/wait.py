"""Waiting for a condition instead of sleeping for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.01  # short beside anything waited for,
_PAUSES = 3  # and long beside a look at it: so many times as long
_LONGEST_S = 0.25


def wait_until(predicate: Callable[[], object], timeout_s: float = 30.0, *, what: str = "") -> None:
    """Returns once `predicate` gives something true. Raises TimeoutError, naming
    `what`, if that takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if predicate():
            return
        ended = time.monotonic()
        if ended >= deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(min(max(_PAUSE_S, _PAUSES * (ended - began)), _LONGEST_S))
