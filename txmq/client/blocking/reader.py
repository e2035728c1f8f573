"""Reading without a group, blocking: nothing is leased or acked, the reader keeps its
own positions. See `reading`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Self, TypeVar

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import Core
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import result
from txmq.client.protocol.offsets import OffsetStore, Spot
from txmq.client.protocol.reader import LOOK_S, POLL_S, SAVE_S, Plan, Reading, Reads, Start
from txmq.errors import ConnectionLost, OffsetOutOfRange, TxmqError
from txmq.model.message import ReceivedMessage
from txmq.wire.frames import Frame

DIAL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two connections
T = TypeVar("T")
log = get_logger()


class Reader(Reads):
    """For one thread, and for use with `with`. Made by `client.reader`."""

    def __init__(
        self, core: Core, name: str, topics: Iterable[str], store: OffsetStore, start: Start
    ) -> None:
        """Raises LocalProtocolError for a name, topics or a start that cannot be
        meant.
        """
        self._core, self._store = core, store
        self._reading = Reading(name, topics, start)
        self._connection: Connection | None = None
        self._asked: dict[int, Spot] = {}
        self._saved_at = self._looked_at = 0.0
        self._pause, self._paused_until = FIRST_PAUSE_S, 0.0
        self.closed = False

    def open(self) -> None:
        """Finds its positions. Called once, by `client.reader`. Raises UnknownTopic,
        LogChanged, as a call does.
        """
        self._reading.load(self._store.load(self.name, self._core.log_id))
        self._look()
        self._saved_at = time.monotonic()

    def assign(self, partitions: Collection[Spot] | None) -> None:
        """Reads only these partitions from now on, or (None) all. What was handed out
        before counts as processed.
        """
        self.commit()
        self._disconnect()
        self._reading.choose(partitions)
        self._look()

    def _look(self) -> None:
        """Which partitions there are, and where new ones begin."""
        self._looked_at = time.monotonic()
        look = self._carried_out(self._reading.look())
        if look is not None:
            self._save()
            self._reading.adopt(look)

    def _carried_out(self, plan: Plan[T]) -> T:
        try:
            ask = next(plan)
            while True:
                ask = plan.send(self._core.request(*ask, repeat=True))
        except StopIteration as end:
            found: T = end.value
            return found

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages, until it is closed. One is processed when the next one is asked
        for.
        """
        while not self.closed:
            message = self.receive(POLL_S)
            if message is not None:
                yield message

    def receive(self, timeout: float | None = None) -> ReceivedMessage | None:
        """The next message; None after `timeout` seconds without one, and once it is
        closed.

        The message before it counts as processed. Lost connections are survived
        silently. Raises why it cannot go on.
        """
        self._reading.processed()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.closed:
            self._save_now_and_then()
            message = self._reading.take()
            if message is not None:
                return message
            left = POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and deadline is not None:
                return None
            self._fetch(max(0.0, min(left, self._saved_at + SAVE_S - time.monotonic())))
        return None

    def commit(self) -> None:
        """Saves the positions now; the message handed out last counts as processed."""
        self._reading.processed()
        self._save()

    def _save_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved_at >= SAVE_S:
            self._save()
        if now - self._looked_at >= LOOK_S:
            try:
                self._look()
            except TxmqError as error:
                if not error.retriable:
                    raise
                log.info("reader.not_looked", reader=self.name, error=str(error))

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._reading.dirty:
            self._store.save(self.name, self._core.log_id, self.positions)
            self._reading.dirty = False

    def _fetch(self, patience: float) -> None:
        """Asks for what nobody has asked for, and waits for an answer."""
        now = time.monotonic()
        if now < self._paused_until:
            time.sleep(min(patience, self._paused_until - now))
            return
        try:
            connection = self._connection or self._connect()
            for spot, ask in self._reading.asks():
                self._asked[connection.write(*ask, now + DIAL_S)] = spot
            if select.select([connection.socket], [], [], patience)[0]:
                for frame in connection.receive(now + patience + DIAL_S):
                    self._take(frame)
        except (TxmqError, OSError) as error:
            self._lost(error)

    def _connect(self) -> Connection:
        self._connection = connection = self._core.dial(time.monotonic() + DIAL_S)
        self._pause = FIRST_PAUSE_S
        return connection

    def _lost(self, error: TxmqError | OSError) -> None:
        """Another connection may help, after a pause that grows, unless the error says
        that none will.
        """
        self._disconnect()
        if (
            isinstance(error, TxmqError)
            and not error.retriable
            and not isinstance(error, ConnectionLost)
        ):
            raise error
        log.warning("reader.disconnected", reader=self.name, error=str(error))
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _take(self, frame: Frame) -> None:
        spot = self._asked.pop(frame.correlation)
        try:
            self._reading.answered(spot, result(frame))
        except OffsetOutOfRange as error:
            self._reading.passed(spot, error)

    def _disconnect(self) -> None:
        self._asked.clear()
        self._reading.lost()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Saves the positions and ends. The message handed out last does not count as
        processed: see `commit`.
        """
        if self.closed:
            return
        self.closed = True
        self._reading.give_up()
        self._disconnect()
        try:
            self._save()
        finally:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
