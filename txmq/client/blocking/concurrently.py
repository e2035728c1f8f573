"""Several blocking calls at once, so that waits for several servers overlap."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
# Far more than are needed: a call that waited for a free thread could be the one that
# all others wait for.
MAX_THREADS = 4_096


def run_concurrently(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of the calls, in order, when all are over.

    The first call runs on the caller's own thread. Raises the error of one of them.
    """
    if not calls:
        return []
    others = [_threads(os.getpid()).submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        for other in others:
            other.exception()  # waits, and costs less than `wait`
    return [first, *(other.result() for other in others)]


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Return the threads of this process: they do not survive a fork."""
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"txmq-{pid}")
