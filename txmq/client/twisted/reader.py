"""Reading without a group with Twisted: what `reading` asks for, over a connection of
the reader's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import UUID

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from txmq.client.log import get_logger
from txmq.client.protocol.offsets import OffsetStore, Spot
from txmq.client.protocol.reader import LOOK_S, POLL_S, SAVE_S, Ask, Plan, Reading, Reads, Start
from txmq.client.twisted.connection import Connected, Link, nothing, timed
from txmq.client.twisted.core import Core
from txmq.client.twisted.protocols import Closing
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    OffsetOutOfRange,
    RequestTimeout,
    TxmqError,
)
from txmq.model.message import ReceivedMessage

ANSWER_S = POLL_S + 10.0
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger()


class Reader(Reads, Closing):
    """For the reactor's thread, and one coroutine. Made by `client.reader`; as the
    blocking one otherwise.

    `async for message in reader` gives messages until it is closed; one is processed
    when the next one is asked for.
    """

    def __init__(
        self, core: Core, name: str, topics: Iterable[str], store: OffsetStore, start: Start
    ) -> None:
        """Raises LocalProtocolError for a name, topics or a start that cannot be
        meant.
        """
        self._core, self._store = core, store
        self._reading = Reading(name, topics, start)
        self._log_id: UUID | None = None
        self._storing = DeferredLock()  # a store is for one thread at a time
        self._connected: Connected | None = None
        self._link: Link | None = None
        self._era = 0  # answers to what was asked for in an earlier one are of no use
        self._taker: Deferred[ReceivedMessage | None] | None = None
        self._failure: BaseException | None = None
        self._looked_at = 0.0
        self._loop = LoopingCall(self._save_now_and_then)
        self._loop.clock = core.reactor
        self.closed = False

    async def opened(self) -> Reader:
        """Itself, with its positions. Called once, by `client.reader`. Raises
        UnknownTopic, LogChanged.
        """
        try:
            self._log_id = await self._core.log_id()
            self._reading.load(await self._stored(self._store.load, self.name, self._log_id))
            await self._look()
        except BaseException:
            await self.close()
            raise
        self._connected = self._core.connect_apart(self._attach, self._fail)
        self._loop.start(SAVE_S, now=False)
        return self

    def assign(self, partitions: Collection[Spot] | None) -> Deferred[None]:
        """Reads only these partitions from now on, or (None) all. What was handed out
        before counts as processed.
        """
        return Deferred.fromCoroutine(self._assign(partitions))

    async def _assign(self, partitions: Collection[Spot] | None) -> None:
        self._reading.processed()
        await self._save()
        self._era += 1
        self._reading.choose(partitions)
        await self._look()
        self._step()

    async def _look(self) -> None:
        """Which partitions there are, and where new ones begin."""
        self._looked_at = self._core.reactor.seconds()
        look = await self._carried_out(self._reading.look())
        if look is not None:
            await self._save()
            self._reading.adopt(look)

    async def _carried_out(self, plan: Plan[T]) -> T:
        try:
            ask = next(plan)
            while True:
                ask = plan.send(await self._core.request(*ask, repeat=True))
        except StopIteration as end:
            found: T = end.value
            return found

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    def receive(self, timeout: float | None = None) -> Deferred[ReceivedMessage | None]:
        """The next message; None after `timeout` seconds without one, and once it is
        closed.

        The message before it counts as processed. Lost connections are survived
        silently. Fails with why it cannot go on. Raises LocalProtocolError where
        somebody waits already.
        """
        if self._taker is not None and not self._taker.called:
            raise LocalProtocolError(
                "somebody waits for the next message already", hint="a reader is for one at a time"
            )
        self._reading.processed()
        taker: Deferred[ReceivedMessage | None] = Deferred()
        self._taker = taker
        if timeout is not None:
            taker.addTimeout(max(0.0, timeout), self._core.reactor, nothing)
        self._step()
        return taker

    def commit(self) -> Deferred[None]:
        """Saves the positions now; the message handed out last counts as processed."""
        self._reading.processed()
        return Deferred.fromCoroutine(self._save())

    async def _save_now_and_then(self) -> None:
        try:
            await self._save()
            if self._core.reactor.seconds() - self._looked_at >= LOOK_S:
                await self._look()
                self._step()
        except TxmqError as error:
            if not error.retriable:
                self._fail(error)
            else:
                log.info("reader.not_looked", reader=self.name, error=str(error))
        except (
            OSError
        ) as error:  # a store that cannot keep positions: going on would only make more come again
            self._fail(error)

    async def _save(self) -> None:
        if self._reading.dirty and self._log_id is not None:
            self._reading.dirty = False
            try:
                await self._stored(self._store.save, self.name, self._log_id, self.positions)
            except BaseException:
                self._reading.dirty = True
                raise

    def _stored(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """What the function of the store returns, called in a thread, one at a time."""

        def step() -> Deferred[T]:
            return self._core.threads.run(function, *args, **kwargs)

        return self._storing.run(step)

    def _attach(self, link: Link) -> None:
        self._link = link
        link.lost.addCallback(lambda _none: self._lost(link))
        self._step()

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._era += 1
            self._reading.lost()
            log.warning("reader.disconnected", reader=self.name)

    def _fail(self, error: BaseException | None) -> None:
        self._failure = error
        self._step()

    def _step(self) -> None:
        """Hands out what has come; where nothing has, asks for what nobody has asked
        for.
        """
        taker, link = self._taker, self._link
        if taker is None or taker.called:
            return
        if self._failure is not None:
            taker.errback(self._failure)
        elif self.closed:
            taker.callback(None)
        elif not self._reading.is_dry:
            taker.callback(self._reading.take())
        elif link is not None:
            for spot, ask in list(self._reading.asks()):
                self._ask(link, spot, ask)

    def _ask(self, link: Link, spot: Spot, ask: Ask) -> None:
        reply = timed(self._core.reactor, link.request(*ask), ANSWER_S, RequestTimeout("no answer"))
        era = self._era
        reply.addCallbacks(
            partial(self._answered, era, spot), partial(self._unanswered, era, link, spot)
        )
        reply.addErrback(self._broken)

    def _answered(self, era: int, spot: Spot, payload: bytes) -> None:
        if era == self._era:
            self._reading.answered(spot, payload)
            self._step()

    def _unanswered(self, era: int, link: Link, spot: Spot, failure: Failure) -> None:
        """A no, or no answer: then another connection may help, unless the error says
        that none will.
        """
        error = failure.value
        if era != self._era:
            return
        if isinstance(error, OffsetOutOfRange):
            self._reading.passed(spot, error)
            self._step()
        elif isinstance(error, TxmqError) and not error.retriable:
            self._fail(error)
        elif not isinstance(error, ConnectionLost):
            link.abort()

    def _broken(self, failure: Failure) -> None:
        """What came makes no sense."""
        self._fail(failure.value)

    def close(self) -> Deferred[None]:
        """Saves the positions and ends. The message handed out last does not count as
        processed: see `commit`.
        """
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._reading.give_up()
        self._step()
        if self._loop.running:
            self._loop.stop()
        if self._connected is not None:
            await self._connected.stop()
        try:
            await self._save()
        finally:
            await self._stored(self._store.close)
