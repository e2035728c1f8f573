"""Waiting for a condition instead of sleeping for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.01  # short beside anything waited for, long beside a look at it


def wait_until(predicate: Callable[[], object], timeout_s: float = 30.0, *, what: str = "") -> None:
    """Returns once `predicate` gives something true. Raises TimeoutError, naming `what`, if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(_PAUSE_S)
