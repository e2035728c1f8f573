"""`client.spool` of a Twisted client."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from txmq.client.blocking.spool import ClientSpool
from txmq.client.twisted.threads import Threads
from txmq.model.durations import Duration
from txmq.model.message import Receipt


class TwistedSpool:
    """The messages of a client that wait on local disk; see `ClientSpool`."""

    def __init__(self, spool: ClientSpool, threads: Threads) -> None:
        self._spool, self._threads = spool, threads

    @property
    def waiting(self) -> int:
        """Messages that wait for the broker."""
        return self._spool.waiting

    @property
    def bytes(self) -> int:
        """Bytes on disk that they occupy."""
        return self._spool.bytes

    @property
    def oldest_at(self) -> int:
        """The time at which the oldest of them was stored here, in microseconds; 0 =
        none.
        """
        return self._spool.oldest_at

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good: `txmq recover` lists them."""
        return self._spool.refused

    def wait(self, timeout: Duration | None = None) -> Deferred[None]:
        """Wait until everything is at the broker, or among the refused."""
        return self._threads.run(self._spool.wait, timeout)

    def place(self, receipt: Receipt, timeout: Duration | None = None) -> Deferred[Receipt]:
        """Wait until a spooled message is at the broker, for its receipt there."""
        return self._threads.run(self._spool.place, receipt, timeout)
