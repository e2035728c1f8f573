"""Slots for prepared transactions that this process uses at each server.

PostgreSQL refuses a PREPARE if all `max_prepared_transactions` are in use, and the work
is lost. Waiting for a slot costs less. The slots of other processes are not counted, so
a server may still be full (docs/PROTOCOL.md 3.4).
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

HINT = (
    "raise max_prepared_transactions, use fewer threads, "
    "or look for branches that were left prepared with `txmq xa doctor`"
)


class SlotDemand(NamedTuple):
    """The slots that a transaction needs at a server, and the limit there."""

    needed: int
    limit: int


class PreparedSlots:
    """The slots that are in use, for all threads of a process.

    A transaction reserves all its slots at once, so that two never wait for each other.
    """

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()  # by the servers' system ids
        self._changed = Condition()

    @contextmanager
    def reserve(self, demand: Mapping[int, SlotDemand], deadline: float) -> Iterator[None]:
        """Reserve slots for the block.

        Raises TwoPhaseFull at the monotonic `deadline`.
        """
        with self._changed:
            while not self._has_room(demand):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise TwoPhaseFull(
                        "This process uses all prepared transactions that a server allows",
                        hint=HINT,
                    )
            for server, (needed, _limit) in demand.items():
                self._used[server] += needed
        try:
            yield
        finally:
            with self._changed:
                for server, (needed, _limit) in demand.items():
                    self._used[server] -= needed
                self._changed.notify_all()

    def _has_room(self, demand: Mapping[int, SlotDemand]) -> bool:
        for server, (needed, limit) in demand.items():
            if needed > limit:
                raise TwoPhaseFull(
                    f"A transaction has {needed} branches at a server that allows {limit}",
                    hint=HINT,
                )
            if self._used[server] + needed > limit:
                return False
        return True


def prepared_slots() -> PreparedSlots:
    """Return the slots of this process; after a fork the child has used none."""
    return _of(os.getpid())


@cache
def _of(pid: int) -> PreparedSlots:
    del pid
    return PreparedSlots()
