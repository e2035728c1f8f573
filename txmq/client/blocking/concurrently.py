"""Several blocking calls at once, for the waits of several databases to overlap."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
# Far more than there are: a call that had to wait for a free thread might be the one
# that the others wait for.
MOST_THREADS = 4_096


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return, in their order; returns when all are over, the first of
    them on the caller's own thread.

    Raises what one of them raised.
    """
    if not calls:
        return []
    others = [_threads(os.getpid()).submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        for other in others:
            other.exception()  # waits, cheaper than `wait`
    return [first, *(other.result() for other in others)]


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Of this process: threads do not survive a fork."""
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=f"txmq-{pid}")
