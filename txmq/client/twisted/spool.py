"""`client.spool` of a Twisted client."""

from __future__ import annotations

from txmq.client.aio.spooling import AioSpool
from txmq.client.blocking.spool import SpoolFigures
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import deferring


class TwistedSpool(SpoolFigures):
    """The messages of a client that wait on local disk; see `ClientSpool`."""

    def __init__(self, bridge: Bridge, awaited: AioSpool) -> None:
        super().__init__(awaited._own_chain)  # noqa: SLF001  # of asyncio's
        self._bridge, self._awaited = bridge, awaited

    wait = deferring(AioSpool.wait)
    place = deferring(AioSpool.place)
