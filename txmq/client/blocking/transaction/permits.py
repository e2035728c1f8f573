"""How many branches of this process stand prepared at a server at once: no more than it
has room for.

PostgreSQL refuses a PREPARE where `max_prepared_transactions` are in use, and the work
is lost. To wait for a place costs less. Other processes take places, too, so that a
server may still turn out to be full.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import Condition
from typing import NamedTuple

from txmq.errors import TwoPhaseFull

HINT = "raise max_prepared_transactions, use fewer threads, or look for what was left prepared: txmq xa doctor"


class Wanted(NamedTuple):
    """So many places of `room` at a server."""

    places: int
    room: int


class Permits:
    """For all threads of a process. A transaction takes all its places at once, so that
    two never wait for each other.
    """

    def __init__(self) -> None:
        self._taken: Counter[int] = Counter()  # by the servers' system ids
        self._changed = Condition()

    @contextmanager
    def held(self, wanted: Mapping[int, Wanted], deadline: float) -> Iterator[None]:
        """Places for the block. Raises TwoPhaseFull where there are none by the
        monotonic time `deadline`.
        """
        with self._changed:
            while not self._free(wanted):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise TwoPhaseFull(
                        "this process has as much prepared at a server as that has room for",
                        hint=HINT,
                    )
            for server, (places, _room) in wanted.items():
                self._taken[server] += places
        try:
            yield
        finally:
            with self._changed:
                for server, (places, _room) in wanted.items():
                    self._taken[server] -= places
                self._changed.notify_all()

    def _free(self, wanted: Mapping[int, Wanted]) -> bool:
        for server, (places, room) in wanted.items():
            if places > room:
                raise TwoPhaseFull(f"{places} branches at a server with room for {room}", hint=HINT)
            if self._taken[server] + places > room:
                return False
        return True


def permits() -> Permits:
    """Those of this process: a child made by a fork has prepared nothing."""
    return _of(os.getpid())


@cache
def _of(pid: int) -> Permits:
    del pid
    return Permits()
