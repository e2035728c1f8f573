"""Handlers with exactly one effect, in threads.

`txmq.client.protocol.awaited.inbox` has the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.consumer.runner import MessageSource, Runner
from txmq.client.protocol.awaited import inbox, inbox_opening
from txmq.client.protocol.awaited.inbox import EVERY_S, InboxWork, Stopped, outstanding
from txmq.client.protocol.consumer.handlers import HandlerOptions, require_finished
from txmq.errors import TxmqError
from txmq.faces import run
from txmq.tx.postgres.commit import commit_and
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.handler_watch import MARK, PROOF
from txmq.tx.postgres.inbox import Claims, Position, claim

if TYPE_CHECKING:
    from txmq.client.blocking.core import BlockingCore
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.model.message import ReceivedMessage
    from txmq.tx.postgres.driver import BlockingConnection

    Connect = Callable[[], BlockingConnection]

CHAINED = 64  # transactions that begin in the round trip of the COMMIT before them


class InboxMember(inbox_opening.InboxMember, Protocol):
    """A member of a consumer, as its inbox uses it in any thread."""

    @property
    def core(self) -> BlockingCore: ...


class InboxSource(MessageSource, Protocol):
    """The members of a consumer, as handlers with an inbox use them."""

    on_added: list[Callable[[Any], object]]

    @property
    def members(self) -> Sequence[InboxMember]: ...
    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None: ...


def run_with_inbox(
    source: InboxSource,
    handler: Callable[..., object],
    connect: Connect,
    options: HandlerOptions,
    stop: Event,
) -> None:
    """Run a handler in transactions. Each thread has a connection of its own, and so
    has the upkeep of each member's inbox.
    """
    inboxes: dict[object, Inbox] = {}
    lock, over = Lock(), Event()
    runner = Runner(
        source,
        lambda: InboxWorker(source, inboxes, handler, connect, options, stop),
        options,
        stop,
    )

    def tend(member: InboxMember) -> None:
        with lock:
            if member.owner not in inboxes and not over.is_set():
                inboxes[member.owner] = Inbox(member, connect, died=runner.fail)
                inboxes[member.owner].start()

    source.on_added.append(tend)  # for members that are added
    try:
        for member in source.members:
            tend(member)
        runner.run()
    finally:
        source.on_added.remove(tend)
        with lock:
            over.set()
        for one in inboxes.values():
            one.stop()


class Database(inbox.Database):
    """A connection that blocks, or none yet."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def connect(self) -> Driver:
        with translated("connecting to PostgreSQL"):
            connection = self._connect()
            connection.autocommit = True
        self._driver = blocking_driver(connection)
        return self._driver

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.connection.close()


class Inbox(inbox.Inbox):
    """The inbox of one member, and the thread that tends it.

    `died` gets what ends the thread early.
    """

    def __init__(
        self, member: InboxMember, connect: Connect, died: Callable[[BaseException], None]
    ) -> None:
        super().__init__(member, CoreAtOnce(member.core), Database(connect))
        self._died = died
        self._lock, self._stopped = Lock(), Event()
        name = f"txmq-{member.settings.group}-inbox"
        self._thread = Thread(target=self._run, name=name, daemon=True)

    async def open(self, driver: Driver, position: Position, topic: str) -> int:
        with self._lock:
            return await self._openings.open_position(driver, position, topic)

    def start(self) -> None:
        """Begin to tend the inbox."""
        self._thread.start()

    def stop(self) -> None:
        """Fold a last time and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                run(self.tend())
                self._stopped.wait(EVERY_S)
            run(self.tend(closing=True))
        except BaseException as error:  # noqa: BLE001  # `run_with_inbox` raises it
            self._died(error)
        finally:
            run(self._database.close())


class _Batch(NamedTuple):
    """Messages to apply in one transaction. `claims` are set where the transaction is
    open already.
    """

    messages: Sequence[DeliveredMessage]
    claims: Claims | None = None


EMPTY = _Batch(())


class InboxWorker(InboxWork):
    """The work of one thread.

    If messages wait, the next ones are received before the COMMIT of those before, so
    that their transaction begins in the round trip that commits. While messages wait no
    thread is idle, so no other thread would have begun them sooner.
    """

    _source: InboxSource

    def __init__(
        self,
        source: InboxSource,
        inboxes: Mapping[object, Inbox],
        handler: Callable[..., object],
        connect: Connect,
        options: HandlerOptions,
        stop: Event,
    ) -> None:
        """See InboxWork."""
        lists = options.batch is not None
        super().__init__(source, inboxes, handler, Database(connect), lists=lists)
        self._options, self._stop = options, stop
        self._next, self._chained = EMPTY, 0  # to chain before the worker receives anew

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        batch, self._chained = _Batch(messages), CHAINED
        while batch.messages:
            self._next = EMPTY
            try:
                run(self.apply_all(*batch))
            except Stopped:
                left = (*batch.messages, *self._next.messages)
                self._source.give_back(outstanding(left))
                return
            batch = self._next

    def close(self) -> None:
        """Close the connection."""
        run(self._database.close())

    async def _finished(self, answer: object) -> None:
        require_finished(answer)

    async def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    async def _apply_one_by_one(self, messages: Iterable[DeliveredMessage]) -> None:
        self._chained = 0
        await super()._apply_one_by_one(messages)

    async def _commit(self, driver: Driver) -> None:
        messages = self._receive_next()
        self._next = _Batch(messages) if messages else self._next
        if not messages or self._closed(messages):
            await super()._commit(driver)
            return
        wanted = self._positions(messages)
        claims = await commit_and(
            driver,
            self._token,
            lambda first: claim(driver, wanted, first=first + MARK),
            before=PROOF,
        )
        self._next = _Batch(messages, claims)

    def _receive_next(self) -> Sequence[DeliveredMessage]:
        """Return waiting messages, if their transaction may begin with the COMMIT.

        With `batch_wait` a list has to fill first.
        """
        if (
            self._next.messages
            or not self._chained
            or self._stop.is_set()
            or self._options.batch_wait
        ):
            return ()
        self._chained -= 1
        try:
            return self._source.receive_many(self._options.batch or 1, 0.0)
        except TxmqError:  # raised again when the runner receives
            return ()
