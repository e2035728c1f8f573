"""One passage of the relay: from a slot to a broker, over one connection to each, until
one of them is lost.

Groups go out without waiting for one another, within a window; their answers come in
the order of the commits. What the broker has made durable is confirmed to the slot, and
nothing else is.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from socket import socket
from threading import Event
from typing import Final, NamedTuple

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import Core
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import result
from txmq.crashpoints import crashpoint
from txmq.errors import (
    DigestMismatch,
    ProtocolError,
    RemoteProtocolError,
    RequestRejected,
    RequestTimeout,
    SequenceGap,
    SlotRewound,
    StaleTopic,
    TxmqError,
    UnknownTopic,
    UnknownTransaction,
)
from txmq.model.bundle import GroupState
from txmq.relay.bundles import Order, at_once, first_step, name_of, name_time, store_in_parts
from txmq.relay.pgoutput import Committed
from txmq.relay.stream import SlotStream, Source
from txmq.wire.emitted import unpack_emitted
from txmq.wire.frames import Frame
from txmq.wire.group import pack_part, unpack_group_receipt
from txmq.wire.headers import Opcode

WINDOW: Final = 256  # groups under way at once
WINDOW_BYTES: Final = 8 << 20
LONG_S: Final = 120.0  # to store what takes many parts
LOOK_S: Final = 0.2  # at whether it shall end
SKEW_US: Final = (
    60_000_000  # commits of one time may stand in the log the other way round, but not by so much
)
REWOUND: Final = "it was restored: `txmq relay create` a slot of another name"
log = get_logger()


class Start(NamedTuple):
    """Where a passage begins: the mark as it stands, up to where all is stored, and
    when that was committed.
    """

    mark: int
    stored: int
    at: int


class Flight(NamedTuple):
    """A transaction on its way; without a correlation there is nothing to wait for but
    those before it.
    """

    committed: Committed
    correlation: int | None = None
    step: int = 0
    size: int = 0
    sent_at: float = 0.0


class Progress:
    """What outlives a passage: counters, which names are too old, and which
    transactions need care.
    """

    def __init__(self) -> None:
        self.refused_ms = 0
        self.careful: set[int] = set()
        self.transactions = self.messages = 0


class Passage:
    """See above. `skip` names transactions, by their LSNs, that an operator has given
    up.
    """

    def __init__(
        self,
        core: Core,
        connection: Connection,
        stream: SlotStream,
        start: Start,
        progress: Progress,
        *,
        confirm_every_s: float,
        skip: Collection[int] = (),
    ) -> None:
        self._core, self._connection, self._stream = core, connection, stream
        self._start, self._progress = start, progress
        self._confirm_every_s, self._skip = confirm_every_s, skip
        self._mark = start.mark
        self._window: deque[Flight] = deque()
        self._window_bytes = 0
        self._answers: dict[int, Frame] = {}
        self._done = self._confirmed = 0
        self._confirmed_at = time.monotonic()

    def run(self, stop: Event) -> None:
        """Returns once `stop` is set and what was under way is stored. Raises what
        ended it.
        """
        while not stop.is_set() or self._window:
            if not stop.is_set():
                self._take_in()
            self._wait()
            self._settle()
            if time.monotonic() - self._confirmed_at >= self._confirm_every_s:
                self._confirm()
        self._confirm()

    def _take_in(self) -> None:
        while len(self._window) < WINDOW and self._window_bytes < WINDOW_BYTES:
            committed = self._stream.read(all_stored=not self._window)
            if committed is None:
                return
            self._accept(committed)

    def _accept(self, committed: Committed) -> None:
        if committed.lsn in self._skip:
            log.error(
                "relay.skipped",
                lsn=committed.lsn,
                messages=len(committed.contents),
                xid=committed.xid,
            )
        elif committed.contents and not self._was_stored(committed):
            with self._telling(committed):
                self._send(committed)
            return
        self._add(Flight(committed))

    @contextmanager
    def _telling(self, committed: Committed) -> Iterator[None]:
        """Notes what the next passage has to do better, and names the transaction where
        that is not in its power.
        """
        try:
            yield
        except StaleTopic:
            for topic in _topics(committed):
                self._core.topics.refresh(topic)
            raise
        except DigestMismatch:
            self._progress.careful.add(committed.lsn)
            raise
        except (UnknownTransaction, SequenceGap):
            raise
        except (RequestRejected, ProtocolError) as error:
            for topic in _topics(committed) if isinstance(error, UnknownTopic) else ():
                self._core.topics.forget(topic)
            _tell_refused(committed, error)
            raise

    def _was_stored(self, committed: Committed) -> bool:
        stored = committed.lsn <= self._start.stored
        if stored and committed.at > self._start.at + SKEW_US:
            message = f"transaction {committed.xid} is younger than what the broker has from later places of the log"
            raise SlotRewound(message, hint=REWOUND)
        return stored

    def _send(self, committed: Committed) -> None:
        order = Order(
            self._stream.source,
            committed,
            tuple(map(unpack_emitted, committed.contents)),
            self._mark,
        )
        step = first_step(committed, self._progress.refused_ms)
        part = None
        if committed.lsn not in self._progress.careful:
            part = at_once(self._core, order, name_of(order.source, committed, step))
        if part is None:
            self._send_in_parts(order)
            return
        payload = pack_part(part)
        deadline = time.monotonic() + self._core.settings.timeout
        correlation = self._connection.write(Opcode.GROUP, payload, deadline)
        self._add(Flight(committed, correlation, step, sum(map(len, payload)), time.monotonic()))
        self._mark = committed.lsn

    def _send_in_parts(self, order: Order) -> None:
        """On its own: all before it are stored by then, and none behind it is under
        way.
        """
        while self._window:
            self._wait()
            self._settle()
        store_in_parts(self._core, order, time.monotonic() + LONG_S)
        self._mark = order.committed.lsn
        self._stored(order.committed)

    def _add(self, flight: Flight) -> None:
        self._window.append(flight)
        self._window_bytes += flight.size

    def _wait(self) -> None:
        """Until the broker has answered, or the slot has more and there is room for
        it.
        """
        if self._window and self._window[0].correlation is None:
            return
        sources: list[socket | SlotStream] = [self._connection.socket]
        room = len(self._window) < WINDOW and self._window_bytes < WINDOW_BYTES
        if room and not (self._window and self._stream.held):
            sources.append(self._stream)
        ready, _, _ = select.select(sources, [], [], LOOK_S)
        if self._connection.socket in ready:
            for frame in self._connection.receive(time.monotonic() + LOOK_S):
                self._answers[frame.correlation] = frame

    def _settle(self) -> None:
        """Takes off the window what is answered, from its beginning on."""
        while self._window:
            flight = self._window[0]
            if flight.correlation is not None:
                answer = self._answers.pop(flight.correlation, None)
                if answer is None:
                    self._look_at_the_time(flight)
                    return
                self._check(flight, answer)
            self._window.popleft()
            self._window_bytes -= flight.size
            if flight.correlation is None:
                self._done = flight.committed.end
            else:
                self._stored(flight.committed)

    def _look_at_the_time(self, flight: Flight) -> None:
        timeout = self._core.settings.timeout
        if time.monotonic() - flight.sent_at > timeout:
            raise RequestTimeout(f"the broker has not answered for {timeout} s")

    def _check(self, flight: Flight, answer: Frame) -> None:
        """Raises where the group is not stored."""
        committed = flight.committed
        try:
            with self._telling(committed):
                receipt = unpack_group_receipt(result(answer))
        except UnknownTransaction:
            self._progress.refused_ms = max(
                self._progress.refused_ms, name_time(committed, flight.step)
            )
            raise
        if GroupState(receipt.state) not in (GroupState.COMMITTED, GroupState.PUBLISHED):
            self._progress.careful.add(committed.lsn)
            raise RemoteProtocolError(
                f"a group that was to be decided at once is in state {receipt.state}"
            )

    def _stored(self, committed: Committed) -> None:
        self._done = committed.end
        self._progress.careful.discard(committed.lsn)
        self._progress.transactions += 1
        self._progress.messages += len(committed.contents)
        crashpoint("relay.after_store")

    def _confirm(self) -> None:
        self._confirmed_at = time.monotonic()
        if self._done > self._confirmed:
            self._stream.confirm(self._done)
            self._confirmed = self._done
            crashpoint("relay.after_feedback")


def start_of(core: Core, source: Source) -> Start:
    """Where the broker stands. On a new timeline the earlier ones tell, up to where it
    parted from them.

    Raises SlotRewound where the database's log ends before that, and as a call does.
    """
    place, at = _mark(core, source.mark(source.timeline))
    if place > source.place:
        message = f"the database's log ends at {source.place}, before {place}, up to where the broker has it"
        raise SlotRewound(message, hint=REWOUND)
    if place:
        return Start(place, place, at)
    for timeline, end in reversed(source.history):
        earlier, at = _mark(core, source.mark(timeline))
        if earlier:
            return Start(0, min(earlier, end), at)
    return Start(0, 0, 0)


def _mark(core: Core, name: str) -> tuple[int, int]:
    mark = core.call("mark.show", {"name": name}, repeat=True)
    return int(mark["place"]), int(mark["at"])


def _tell_refused(committed: Committed, error: TxmqError) -> None:
    """Nothing behind it goes out before it does: an operator has to see to it, or give
    it up (`skip`).
    """
    log.error(
        "relay.refused", lsn=committed.lsn, xid=committed.xid, at=committed.at, error=str(error)
    )


def _topics(committed: Committed) -> set[str]:
    return {unpack_emitted(content).topic for content in committed.contents}
