"""An asyncio client with a spool. The blocking sender makes its sends, in a thread."""

from __future__ import annotations

import asyncio
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar, Unpack

from txmq.client.aio.client import Client, log_dropped, receipts_of
from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import cancelled
from txmq.client.aio.spool_queue import SpoolQueue
from txmq.client.blocking.spool import LOOK_EVERY_S, ClientSpool, SpoolFigures
from txmq.client.blocking.spooling_client import SpoolingClient as BlockingClient
from txmq.client.blocking.spooling_client import stored_batches
from txmq.client.blocking.spooling_core import SpoolingCore
from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_messages
from txmq.client.protocol.settings import ClientSettings
from txmq.errors import RequestTimeout, Throttled, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.measures import counted
from txmq.model.message import Message, Receipt

T = TypeVar("T")


class AioSpool(SpoolFigures):
    """The messages of a client that wait on local disk; see `ClientSpool`."""

    def __init__(self, spool: ClientSpool) -> None:
        super().__init__(spool._own_chain)  # noqa: SLF001  # of the blocking face
        self._spool = spool

    async def wait(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until everything is at the broker, or among the refused.

        Raises RequestTimeout; what waits then stays on disk.
        """
        await _in_slices(self._spool.wait, seconds_of(timeout, "timeout"))

    async def place(self, receipt: Receipt, timeout: Duration | None = None) -> Receipt:  # noqa: ASYNC109  # as of the other faces
        """Wait until a spooled message is at the broker, for its receipt there.

        The rest is as for the blocking client.
        """
        return await _in_slices(partial(self._spool.place, receipt), seconds_of(timeout, "timeout"))


async def _in_slices(call: Callable[[float], T], seconds: float | None) -> T:
    """Make a call that waits, again and again in a thread: each lasts a moment only, so
    that a cancelled wait leaves no thread behind.
    """
    began = time.monotonic()
    while True:
        left = LOOK_EVERY_S if seconds is None else began + seconds - time.monotonic()
        try:
            return await asyncio.to_thread(call, max(0.0, min(left, LOOK_EVERY_S)))
        except RequestTimeout as late:
            if seconds is None or left > LOOK_EVERY_S:
                continue
            error: TxmqError = RequestTimeout(
                f"the broker does not have it after {seconds:.3g} s", hint=late.hint
            )
            error.outcome = "not done"
            raise error from None


class SpoolingClient(Client):
    """A client of one broker, which keeps messages on local disk while no broker
    answers.

    A send then returns a receipt that is `spooled`. Whatever waits on disk goes before
    anything sent later. Transactions do not use the spool.
    """

    def __init__(self, url: str, settings: ClientSettings) -> None:
        """Raises StoreError where the spool cannot be opened."""
        core = AioCore(url, settings)
        super().__init__(core)
        self._blocking = BlockingClient(SpoolingCore(*core.identity))
        self._spool = AioSpool(self._blocking.spool)
        self._queue_of_loop: SpoolQueue | None = None
        self._room: deque[Future[None]] = deque()  # callers that wait for room
        self._unanswered = set[Future[Receipt]]()

    @property
    def spool(self) -> AioSpool:  # type: ignore[override]  # which raises without one
        """The messages that wait on local disk."""
        return self._spool

    @property
    def stats(self) -> SenderStats:
        """The counters of sends."""
        return self._blocking.stats

    @property
    def _queue(self) -> SpoolQueue:
        loop = self._core.loop
        if self._core.closed or self._closing is not None:
            raise client_closed()
        if self._queue_of_loop is None:
            self._queue_of_loop = SpoolQueue(loop, self._blocking)
        return self._queue_of_loop

    async def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Receipt:
        """Send a message and return its receipt, once it is stored or on local disk.

        Where the call is cancelled while it waits for room, nothing is done; later the
        message may be stored. `txmq.aio.outcome_of(error)` tells which.
        """
        future = await self._accept(topic, Message(body, **fields), partition, None)
        try:
            return await future
        except asyncio.CancelledError as error:
            cancelled(error, "unknown", "a send")
            raise

    async def _accept(
        self, topic: str, message: Message, partition: int | None, patience: float | None
    ) -> Future[Receipt]:
        queue = self._queue
        try:
            async with asyncio.timeout(
                self._core.settings.timeout if patience is None else patience
            ):
                while self._full:
                    await self._wait_for_room()
        except TimeoutError:
            raise Throttled(
                f"{counted(len(self._unanswered), 'message')} without a receipt",
                hint="wait for some, or raise `window`",
            ) from None
        except asyncio.CancelledError as error:
            cancelled(error, "not done", "a send")
            raise
        return self._submit(queue, topic, message, partition)

    def _submit(
        self, queue: SpoolQueue, topic: str, message: Message, partition: int | None
    ) -> Future[Receipt]:
        receipt: Future[Receipt] = self._core.loop.create_future()
        self._unanswered.add(receipt)
        receipt.add_done_callback(self._answered)
        queue.add(topic, message, partition, receipt)
        return receipt

    @property
    def _full(self) -> bool:
        return len(self._unanswered) >= self._core.settings.window

    async def _wait_for_room(self) -> None:
        waiter: Future[None] = self._core.loop.create_future()
        self._room.append(waiter)
        try:
            await waiter
        finally:
            self._room.remove(waiter)
            self._wake_for_room()

    def _answered(self, receipt: Future[Receipt]) -> None:
        self._unanswered.discard(receipt)
        self._wake_for_room()

    def _wake_for_room(self) -> None:
        """Wake the caller that has waited longest. It stays first until it goes on."""
        if self._room and not self._full and not self._room[0].done():
            self._room[0].set_result(None)

    async def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> list[Receipt]:
        """Send messages together and return their receipts in order.

        It is not all or nothing.
        """
        futures: list[Future[Receipt]] = []
        try:
            for message in checked_messages(messages):
                futures.append(await self._accept(topic, message, partition, None))  # noqa: PERF401  # known so far
            return receipts_of(await asyncio.gather(*futures, return_exceptions=True))
        except asyncio.CancelledError as error:
            for future in futures:
                future.cancel()
            error.outcome = None  # type: ignore[attr-defined]  # of the last message
            cancelled(error, "unknown" if futures else "not done", "a batch of sends")
            raise
        except TxmqError as error:
            for future in futures:
                future.add_done_callback(_retrieve)
            if futures:  # sent again as a whole, these would be stored twice
                error.outcome = "unknown"
            raise

    async def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> list[StoredBatch]:
        """Send messages that are given as columns. With a spool this costs what `send`
        costs for each of them.
        """
        messages = column_messages(bodies, keys, tags)
        receipts = await self.send_batch(topic, messages, partition=partition)
        return list(stored_batches(receipts))

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt. It is lost where the window is full."""
        queue, message = self._queue, Message(body, **fields)

        async def send() -> None:
            future = await self._accept(topic, message, partition, None)
            await future

        if self._full:
            self._core.start(send())
            return
        future = self._submit(queue, topic, message, partition)
        future.add_done_callback(lambda sent: log_dropped(sent, topic))

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until each message has its receipt or has failed.

        Raises RequestTimeout.
        """
        patience = seconds_of(timeout, "timeout")
        if patience is None:
            patience = self._core.settings.delivery_timeout
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=patience)
        if self._unanswered:
            raise RequestTimeout(f"not everything had its receipt within {patience:.3g} s")

    async def _close(self) -> None:
        queue = self._queue_of_loop
        try:
            if queue is not None:
                queue.send_now()
                await queue.run(_nothing)
        finally:
            try:
                await super()._close()
            finally:
                await asyncio.to_thread(self._blocking.close)
                if queue is not None:
                    queue.stop()


def _nothing() -> None:
    """Come after everything in the thread."""


def _retrieve(future: Future[Receipt]) -> None:
    """Take note of a failure that nobody will ask for."""
    if not future.cancelled():
        future.exception()
