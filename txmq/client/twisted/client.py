"""The client for programs on Twisted: each call returns a Deferred."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from txmq.client.aio import client
from txmq.client.aio import cluster as aio_cluster
from txmq.client.aio.closing import AsyncCloseable
from txmq.client.protocol.sender.multi_send import warn_of_unsent
from txmq.client.protocol.settings import EXIT_S
from txmq.client.protocol.transaction.checks import Half
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.consumer import Consumer
from txmq.client.twisted.deferring import at_once, deferring, making
from txmq.client.twisted.messages import TwistedMessageCalls, half_message
from txmq.client.twisted.reader import Reader
from txmq.client.twisted.transaction import TransactionCalls
from txmq.client.twisted.typed import TypedTopicCalls
from txmq.errors import TxmqError

if TYPE_CHECKING:  # for programs that have a database, or a spool
    from collections.abc import Awaitable, Callable

    from twisted.internet.defer import Deferred

    from txmq.client.twisted.spool import TwistedSpool
    from txmq.model.message import Decision

    Checker = Callable[[Half], Decision | Awaitable[Decision]]


class Client(TransactionCalls, TypedTopicCalls, TwistedMessageCalls, AsyncCloseable):
    """A client of one broker, for the reactor's thread. Made by `txmq.twisted.connect`.

    An `async with` block closes it at its end. Deferreds fail as the calls of the
    blocking client raise. They fail with BrokerUnavailable where no broker answers in
    time, and with ClientClosed after `close`. They fail with a kind of RequestRejected
    where the broker refuses. Without an answer they fail with ConnectionLost or
    RequestTimeout: whether the request was carried out is then unknown. To cancel a
    Deferred cancels the call, as on asyncio; `txmq.aio.outcome_of(error)` tells what
    became of it.
    """

    _awaited: client.Client

    def __init__(self, bridge: Bridge, awaited: client.Client) -> None:
        self._bridge, self._awaited = bridge, awaited

    @property
    def spool(self) -> TwistedSpool:
        """The messages on local disk of a client made with `spool=`.

        Raises ConfigError for any other client.
        """
        found = getattr(self._awaited, "spool")  # noqa: B009  # of a client without one it raises
        from txmq.client.twisted.spool import TwistedSpool  # noqa: PLC0415  # few need it

        return TwistedSpool(self._bridge, found)

    send = deferring(client.Client.send)
    send_batch = deferring(client.Client.send_batch)
    send_many = deferring(client.Client.send_many)
    send_one_way = at_once(client.Client.send_one_way)
    half = making(client.Client.half, half_message)
    flush = deferring(client.Client.flush)
    log_id = deferring(client.Client.log_id)
    call = deferring(client.Client.call)
    read = deferring(client.Client.read)
    consumer = making(client.Client.consumer, Consumer)
    reader = making(client.Client.reader, Reader)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide the half transactions of a checker.

        The checker gets a Half and returns COMMIT, ROLLBACK or UNKNOWN, or a Deferred
        of it. It is called on the reactor's thread. The rest is as for the blocking
        client.
        """
        register(self._bridge, self._awaited, name, checker)

    def close(self) -> Deferred[None]:
        """Close the client: its consumers leave their groups.

        Messages without a receipt may still get it for a while.
        """
        return self._bridge.close(self._awaited.close)


def register(
    bridge: Bridge, awaited: client.Client | aio_cluster.Cluster, name: str, checker: Checker
) -> None:
    """Register a checker, which is called on the reactor's thread."""
    called = partial(bridge.in_reactor, checker)
    bridge.at_once(lambda: awaited.register_checker(name, called))


async def finish_sends(*clients: client.Client) -> None:
    """Let sends finish for a while, because the reactor stops without `close`. Warn of
    messages without a receipt.
    """
    await asyncio.gather(*map(_finish_sends, clients))


async def _finish_sends(awaited: client.Client) -> None:
    core = awaited._core  # noqa: SLF001  # of asyncio's
    if core.settings.spool is not None:
        with suppress(TxmqError):  # what is left is on disk
            await awaited.flush(EXIT_S)
    if not await core.flush(EXIT_S):
        warn_of_unsent(await core.sender.close())
