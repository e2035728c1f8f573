"""The sender of a client with a spool: its messages go to disk while no broker
answers.

    accumulator ──► broker                    while nothing is in the spool
    accumulator ──► spool ──► broker          from the first failure until it is drained

One thread does all of it, so that the order of messages is that of the accumulator. A
batch that was in flight when the connection was lost goes to the spool with the
sequence that it had. New messages follow directly once the spool is drained; while only
its last receipts are missing they wait in the accumulator. Else a steady stream of
messages would never leave the spool.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.stream import NonBlockingConnection
from txmq.client.blocking.sender.sender import CHECK_EVERY_S, CONNECT_S, Sender
from txmq.client.log import get_logger
from txmq.client.protocol.sender.batcher import SequencedBatch
from txmq.client.protocol.sender.spool_chain import SpoolChain, spooled_receipts
from txmq.client.protocol.sender.spool_drain import InDoubt, Skip, SpoolDrain
from txmq.client.protocol.sender.spool_topics import SpoolTopics
from txmq.client.protocol.settings import ClientSettings
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ConnectionLost,
    DiskFull,
    RequestRejected,
    SpoolFull,
    StoreError,
    TxmqError,
)
from txmq.wire.frames import Frame

STORE_BYTES = 4 << 20  # of one flush to disk
FULL_S = 0.1  # between attempts while the spool or its disk is full
FIRST_PROBE_S, LONGEST_PROBE_S = 0.05, 1.0
log = get_logger()


class BrokerProbe:
    """A thread that looks for the broker, while the sender's thread stores messages.

    `found` is called once there is a connection, or an error that waiting cannot mend.
    """

    def __init__(self, connect: Callable[[float], Connection], found: Callable[[], None]) -> None:
        self._connect, self._found = connect, found
        self._stopped = Event()
        self.connection: Connection | None = None
        self.refusal: TxmqError | None = None
        self._thread = Thread(target=self._run, name="txmq-probe", daemon=True)
        self._thread.start()

    def stop(self) -> Connection | None:
        """End the thread, and return the connection if there is one."""
        self._stopped.set()
        self._thread.join()
        return self.connection

    def _run(self) -> None:
        pause = FIRST_PROBE_S
        while not self._stopped.wait(pause):
            try:
                self.connection = self._connect(time.monotonic() + CONNECT_S)
            except TxmqError as error:
                self.refusal = None if error.retriable else error
                pause = min(2 * pause, LONGEST_PROBE_S)
            else:
                self._found()
                return


class SpoolingSender(Sender):
    """A sender with a spool. `is_stored` searches the broker for a message, `skip`
    tells it what will not come.
    """

    def __init__(
        self,
        connect: Callable[[float], Connection],
        topics: SpoolTopics,
        chain: SpoolChain,
        is_stored: Callable[[InDoubt], bool],
        skip: Callable[[Skip], None],
        settings: ClientSettings,
    ) -> None:
        super().__init__(
            connect,
            topics,
            window=settings.window,
            window_bytes=settings.window_bytes,
            attempt=settings.attempt_s,
            timeout=settings.timeout,
            delivery_timeout=settings.delivery_timeout,
        )
        self._spool_topics, self._chain = topics, chain
        self._is_stored, self._tell_skip = is_stored, skip
        self._refuse_when_full = settings.spool_full == "refuse"
        self._drain: SpoolDrain | None = None
        self._idle_drain = False  # it had nothing to write in this turn
        self._full = False  # the last batch did not fit
        self._in_outage = False  # batches have sequences of a session for the spool
        self.offline = False
        topics.offline = lambda: self.offline

    def start(self) -> None:
        """Start the thread, where something is in the spool already."""
        if self._thread is None:
            self._start()

    def discard_after_fork(self) -> None:
        super().discard_after_fork()
        self._chain.abandon()

    # The thread's work, in the order of its life.

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            with suppress(StoreError):
                self._chain.close()

    def _finish(self) -> None:
        self._store()  # what was not sent in time waits for the next process

    def _done(self) -> bool:
        if self._drain is None or self.offline or self._close_deadline is None:
            return super()._done()
        return time.monotonic() >= self._close_deadline

    def _await_work(self) -> None:
        if self._chain.empty:
            super()._await_work()

    def _connect(self) -> NonBlockingConnection | None:
        connection = super()._connect()
        if connection is None:
            connection = self._wait_offline()
        return connection

    def _wait_offline(self) -> NonBlockingConnection | None:
        """Store what comes, until a broker answers."""
        log.warning("spool.offline", error=self._connection_error, spool=self._chain.own.path)
        self.offline = True
        probe = BrokerProbe(self._open, self._wake)
        try:
            while not self._done() and probe.connection is None:
                if probe.refusal is None:
                    self._store()
                else:
                    self._in_flight.fail_all(probe.refusal)
                self._expire(time.monotonic())
                self._sleep_offline()
        finally:
            self.offline = False
            found = probe.stop()
        if found is None:
            return None
        self._connection_error, self._caller_io.error = "", None
        self.stats.connections += 1
        return NonBlockingConnection(found)

    def _sleep_offline(self) -> None:
        idle = self._accumulator.sleep_if_idle(can_send=True)
        self._wakes_only.select(CHECK_EVERY_S if idle else FULL_S if self._full else 0.01)
        self._drain_wakes()

    def _converse(self, connection: NonBlockingConnection) -> None:
        welcome = connection.conversation.welcome
        assert welcome is not None, "the connection is welcomed"
        self._chain.set_log(welcome.log_id, welcome.incarnation)
        self._in_flight.stale_topics |= self._spool_topics.unrouted
        self._spool_topics.unrouted.clear()
        self._choose_drain()
        super()._converse(connection)
        if self._drain is not None:
            self._drain.connection_lost()

    def _choose_drain(self) -> None:
        """Drain the first spool, or let messages go to the broker directly."""
        if self._drain is None and not self._chain.empty:
            self._drain = SpoolDrain(self._chain.first, self._topics)
        self._in_flight.held = self._drain is not None
        if self._drain is None and self._in_outage:
            self._in_outage = False
            self._in_flight.renew_session()

    def _send(self, connection: NonBlockingConnection) -> None:
        if self._drain is not None and not connection.unsent:
            try:
                self._drain_some(connection, self._drain)
            except DiskFull as error:
                log.warning("spool.disk_full", error=error.message)
                self._full = True
        super()._send(connection)

    def _drain_some(self, connection: NonBlockingConnection, drain: SpoolDrain) -> None:
        """Store what came, and write what may be sent."""
        self._full = False
        if drain.done and not drain.awaits_replies:
            self._chain.finish_first()
            self._drain = None
            self._choose_drain()
            return
        if drain.halted is not None:
            self._in_flight.fail_waiting(drain.halted)
        elif self._stores_now(drain):
            self._store()
        if drain.may_ask:
            self._ask(drain)
        if not drain.awaits_replies:
            self._caller_io.last_received = time.monotonic()
        writes = drain.next_writes(connection.conversation)
        self._idle_drain = not (writes or drain.may_ask)
        connection.write(writes)

    def _ask(self, drain: SpoolDrain) -> None:
        """Make the calls that the drain needs before it can go on."""
        if drain.in_doubt is not None:
            self._search(drain, drain.in_doubt)
        if drain.to_skip is not None:
            self._skip(drain, drain.to_skip)
        for topic in sorted(drain.unknown_topics):
            self._refresh_for(drain, topic)

    def _stores_now(self, drain: SpoolDrain) -> bool:
        """Return whether new messages go to disk: not for the sake of the last receipts
        that are missing.
        """
        return self._chain.first is not self._chain.own or not drain.all_sent

    def _refresh_for(self, drain: SpoolDrain, topic: str) -> None:
        try:
            self._topics.refresh(topic)
        except RequestRejected as error:
            if error.retriable:
                drain.pause()
            else:
                drain.topic_refreshed(topic, error)
        except TxmqError:
            drain.pause()
        else:
            drain.topic_refreshed(topic)

    def _search(self, drain: SpoolDrain, message: InDoubt) -> None:
        try:
            stored = self._is_stored(message)
        except TxmqError as error:
            log.warning("spool.not_searched", message=message.message_id, error=error.message)
            if isinstance(error, RequestRejected) and not error.retriable:
                drain.search_refused(error)
            else:
                drain.pause()
        else:
            drain.settle(stored=stored)

    def _skip(self, drain: SpoolDrain, skip: Skip) -> None:
        try:
            self._tell_skip(skip)
        except TxmqError as error:
            log.warning("spool.not_skipped", spool=self._chain.first.path, error=error.message)
            if isinstance(error, RequestRejected) and not error.retriable:
                drain.skipped(error)
            else:
                drain.pause()
        else:
            crashpoint("spool.after_skip")
            drain.skipped()

    def _receive(self, replies: list[Frame]) -> None:
        if self._drain is not None:
            try:
                self._drain.receive(replies)
            except DiskFull as error:  # the refusal waits in the drain
                log.warning("spool.disk_full", error=error.message)
            self._chain.notify()
        super()._receive(replies)

    def _claim_reads(self) -> bool:
        if self._drain is None:
            return super()._claim_reads()
        self._caller_io.thread_reads = True
        return True

    def _select(
        self,
        selector: selectors.BaseSelector,
        connection: NonBlockingConnection,
        timeout: float | None,
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if self._drain is None or timeout == 0:
            return super()._select(selector, connection, timeout)
        # Callers must not read: the replies are for the drain.
        self._caller_io.io_lock.release()
        try:
            return selector.select(timeout)
        finally:
            self._caller_io.io_lock.acquire()

    def _wait_timeout(self, connection: NonBlockingConnection) -> float | None:
        timeout = super()._wait_timeout(connection)
        drain = self._drain
        if drain is None or connection.unsent:
            return timeout
        if not self._idle_drain or (drain.done and not drain.awaits_replies):
            return 0
        if self._full:
            return FULL_S
        if self._stores_now(drain) and not self._accumulator.sleep_if_idle(can_send=True):
            return 0
        paused = drain.paused_until - time.monotonic()
        return max(0.001, min(CHECK_EVERY_S, paused if paused > 0 else CHECK_EVERY_S))

    def _awaits_replies(self) -> bool:
        draining = self._drain is not None and self._drain.awaits_replies
        return draining or super()._awaits_replies()

    def _expire(self, now: float) -> None:
        if self._full:
            error = SpoolFull(f"not taken within {self._timeout:.3g} s: {self._connection_error}")
            self._in_flight.fail_older(now - self._timeout, error)
        super()._expire(now)

    # Storing.

    def _store(self) -> None:
        """Bring what waits to disk, as far as there is room, and give its receipts."""
        self._full = False
        while batches := self._take():
            self._bring_to_disk(batches)
            for batch in batches:
                self._accumulator.complete(batch.pending, spooled_receipts(batch))
                self.stats.spooled += len(batch.futures)
            self._chain.notify()

    def _take(self) -> list[SequencedBatch]:
        """Return the next batches for one flush, none where there is no room."""
        batches: list[SequencedBatch] = []
        size = 0
        try:
            while size < STORE_BYTES:
                if not (self._in_outage or self._in_flight.has_doubtful):
                    self._in_outage = True
                    self._in_flight.renew_session()
                more = self._in_flight.size_to_store()
                if not more:
                    break
                self._chain.require_room(size + more)
                batch = self._in_flight.next_to_store()
                if batch is None:
                    break
                batches.append(batch)
                size += len(batch.payload[1])
        except (SpoolFull, DiskFull) as error:
            self._refuse(error)
        return batches

    def _refuse(self, error: StoreError) -> None:
        if self._refuse_when_full:
            self._in_flight.fail_waiting(
                error if isinstance(error, SpoolFull) else SpoolFull(error.message)
            )
        elif not self._full:
            log.warning("spool.full", error=error.message)
        self._full = True
        self._connection_error = error.message

    def _bring_to_disk(self, batches: list[SequencedBatch]) -> None:
        """Bring batches to disk, even where that has to wait for room."""
        staged = False
        while True:
            try:
                if not staged:
                    self._chain.stage(batches)
                    staged = True
                self._chain.own.flush()
            except DiskFull as error:
                log.warning("spool.disk_full", error=error.message)
                time.sleep(FULL_S)
                if self._close_deadline is None or time.monotonic() < self._close_deadline:
                    continue
                self._fail(batches, error)
                raise
            except StoreError as error:
                self._fail(batches, error)
                raise
            return

    def _fail(self, batches: list[SequencedBatch], error: StoreError) -> None:
        for batch in batches:
            self._accumulator.fail(
                batch.pending, ConnectionLost(f"it may be in the spool: {error.message}")
            )
