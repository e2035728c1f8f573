"""Wait for a condition instead of sleeping for a guessed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

# The longest that a wait for what has to happen may take, on a busy machine as well.
# TXMQ_TEST_PATIENCE multiplies it.
PATIENCE_S: Final = 120.0 * float(os.environ.get("TXMQ_TEST_PATIENCE", "1"))
_PAUSE_S = 0.01  # the shortest pause
_PAUSE_FACTOR = 3  # a pause lasts as long as three calls of the predicate
_LONGEST_PAUSE_S = 0.25


def wait_until(
    predicate: Callable[[], object], timeout_s: float = PATIENCE_S, *, what: str = ""
) -> None:
    """Wait until `predicate` returns a true value.

    Raises TimeoutError with the text `what` after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if predicate():
            return
        ended = time.monotonic()
        if ended >= deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(min(max(_PAUSE_S, _PAUSE_FACTOR * (ended - began)), _LONGEST_PAUSE_S))
