"""A Twisted client with a spool. Its sends are made by the blocking sender, in a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Unpack

from twisted.internet.defer import Deferred, DeferredList, succeed

from txmq.client.blocking.spooling_client import SpoolingClient as BlockingClient
from txmq.client.blocking.spooling_client import stored_batches
from txmq.client.blocking.spooling_core import SpoolingCore
from txmq.client.protocol.awaited.spool_queue import SendMessage, SpoolQueue
from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_messages
from txmq.client.protocol.settings import EXIT_S, ClientSettings
from txmq.client.twisted.client import Client, log_dropped, receipts_of
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.spool import TwistedSpool
from txmq.client.twisted.threads import Threads
from txmq.model.durations import Duration
from txmq.model.message import Message, Receipt


class ReactorQueue(SpoolQueue["Deferred[Receipt]"]):
    """The messages on their way to the thread, and their receipts."""

    def __init__(self, reactor: Reactor, in_order: Threads, send: SendMessage) -> None:
        super().__init__(send)
        self._reactor, self._in_order = reactor, in_order

    def _soon(self, call: Callable[[], None]) -> None:
        self._reactor.callLater(0, call)

    def _in_thread(self, call: Callable[[], None]) -> None:
        self._in_order.run(call)

    def _on_loop(self, call: Callable[[], None]) -> None:
        self._reactor.callFromThread(call)

    def _resolve(self, answer: Deferred[Receipt], receipt: Receipt) -> None:
        if not answer.called:
            answer.callback(receipt)

    def _fail(self, answer: Deferred[Receipt], error: BaseException) -> None:
        if not answer.called:
            answer.errback(error)


class SpoolingClient(Client):
    """A client of one broker, which keeps messages on local disk while no broker
    answers.

    A send then has a receipt that is `spooled`. Whatever waits on disk goes before
    anything sent later. Transactions do not use the spool.
    """

    def __init__(self, reactor: Reactor, url: str, settings: ClientSettings) -> None:
        """Raises StoreError where the spool cannot be opened."""
        core = TwistedCore(reactor, url, settings, blocking_client=_blocking_client)
        super().__init__(core)
        self._reactor = reactor
        assert isinstance(core.blocking, BlockingClient), "as it was made"
        self._blocking = core.blocking
        self._in_order = Threads(reactor, 1)
        self._spool = TwistedSpool(self._blocking.spool, core.threads)
        self._queue = ReactorQueue(reactor, self._in_order, self._blocking.send_message)
        self._closed = False
        self._at_shutdown: object = reactor.addSystemEventTrigger(
            "before", "shutdown", self._close_at_shutdown
        )

    @property
    def spool(self) -> TwistedSpool:
        """The messages that wait on local disk."""
        return self._spool

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Send a message, for its receipt, once it is stored or on local disk."""
        return self._submit(topic, Message(body, **fields), partition)

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Send messages together, for their receipts in order. It is not all or
        nothing.
        """
        return self._submit_all(topic, checked_messages(messages), partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Send messages that are given as columns. With a spool this costs what `send`
        costs for each of them.
        """
        messages = column_messages(bodies, keys, tags)
        sent = self._submit_all(topic, messages, partition)
        return sent.addCallback(lambda receipts: list(stored_batches(receipts)))

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        if self._closed:
            raise client_closed("txmq.twisted.connect")
        self._submit(topic, Message(body, **fields), partition).addErrback(log_dropped, topic)

    def flush(self, timeout: Duration | None = None) -> Deferred[None]:
        """Wait until each message has its receipt or has failed."""
        return self._in_order.run(self._blocking.flush, timeout)

    def close(self) -> Deferred[None]:
        """Close the client: its consumers leave their groups.

        What waits on disk stays there for the next client with this directory.
        """
        if self._closed:
            return succeed(None)
        self._queue.send_now()
        self._closed = True
        if self._at_shutdown is not None:
            self._reactor.removeSystemEventTrigger(self._at_shutdown)
        return Deferred.fromCoroutine(self._close_all())

    def _close_at_shutdown(self) -> Deferred[None]:
        self._at_shutdown = None
        return self.close().addTimeout(2 * EXIT_S, self._reactor)

    async def _close_all(self) -> None:
        await self._in_order.run(lambda: None)  # after everything sent so far
        await self._close()
        await self._in_order.stop()

    def _submit_all(
        self, topic: str, messages: Sequence[Message], partition: int | None
    ) -> Deferred[list[Receipt]]:
        sent = [self._submit(topic, message, partition) for message in messages]
        return DeferredList(sent, consumeErrors=True).addCallback(receipts_of)

    def _submit(self, topic: str, message: Message, partition: int | None) -> Deferred[Receipt]:
        receipt: Deferred[Receipt] = Deferred(lambda _cancelled: None)
        if self._closed:
            receipt.errback(client_closed("txmq.twisted.connect"))
            return receipt
        self._queue.add(topic, message, partition, receipt)
        return receipt


def _blocking_client(core: TwistedCore) -> BlockingClient:
    return BlockingClient(SpoolingCore(*core.identity))
