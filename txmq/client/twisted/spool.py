"""`client.spool` of a Twisted client."""

from __future__ import annotations

from txmq.client.aio.spooling import AioSpool
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import deferring


class TwistedSpool:
    """The messages of a client that wait on local disk; see `ClientSpool`."""

    def __init__(self, bridge: Bridge, awaited: AioSpool) -> None:
        self._bridge, self._awaited = bridge, awaited

    @property
    def waiting(self) -> int:
        """Messages that wait for the broker."""
        return self._awaited.waiting

    @property
    def bytes(self) -> int:
        """Bytes on disk that they occupy."""
        return self._awaited.bytes

    @property
    def oldest_at(self) -> int:
        """The time at which the oldest of them was stored here, in microseconds; 0 =
        none.
        """
        return self._awaited.oldest_at

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good: `txmq recover` lists them."""
        return self._awaited.refused

    wait = deferring(AioSpool.wait)
    place = deferring(AioSpool.place)
