"""One session of the relay: it ends when the slot's or the broker's connection is lost.

Bundles go out without waiting for one another, within a window. Their answers come in
the order of the commits. Only transactions that the broker has made durable are
confirmed to the slot.
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
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import reply_payload
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
from txmq.model.bundle import COMMITTED, BundleState
from txmq.relay.bundles import (
    RelayedTransaction,
    build_whole,
    derive_token,
    first_attempt,
    store_in_parts,
    token_time,
)
from txmq.relay.pgoutput import CommittedTransaction
from txmq.relay.slot_stream import SlotSource, SlotStream
from txmq.tx.postgres.identity import format_lsn
from txmq.wire.bundle import pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame
from txmq.wire.logical_message import unpack_emitted

WINDOW: Final = 256  # bundles in flight
WINDOW_BYTES: Final = 8 << 20
LARGE_S: Final = 120.0  # to store a bundle of many parts
POLL_S: Final = 0.2  # between checks of the stop event
ANOTHER: Final = (
    "run `txmq relay create DSN --slot NEW --replaces {slot}`, and the relay with slot NEW"
)
REWOUND: Final = f"the database was restored: {ANOTHER}"
LEFT_BEHIND: Final = f"point the relay at the primary; if this is the primary: {ANOTHER}"
LATER: Final = 4  # timelines that are looked for: not every failover has messages
log = get_logger()


class StartPosition(NamedTuple):
    """The broker's position at the start of a session.

    All transactions up to `stored_lsn` are stored. The last one committed at
    `committed_at`, and at `last_lsn` of this log, unless that is 0.
    """

    watermark: int
    stored_lsn: int
    committed_at: int
    last_lsn: int = 0


class InFlightTransaction(NamedTuple):
    """A transaction in the window; one without a correlation expects no answer."""

    committed: CommittedTransaction
    correlation: int | None = None
    attempt: int = 0
    size: int = 0
    sent_at: float = 0.0


class RelayProgress:
    """The state that outlives a session.

    Tokens up to `refused_ms` are too old for the broker. `in_parts` has the LSNs of
    transactions to store in parts, after a check for earlier attempts.
    """

    def __init__(self) -> None:
        self.refused_ms = 0
        self.in_parts: set[int] = set()
        self.transactions = self.messages = 0


class RelaySession:
    """A session that stores the transactions of a slot at a broker.

    `skip` has the LSNs of transactions that an operator has given up.
    """

    def __init__(
        self,
        core: BlockingCore,
        connection: Connection,
        stream: SlotStream,
        start: StartPosition,
        progress: RelayProgress,
        *,
        confirm_every_s: float,
        skip: Collection[int] = (),
    ) -> None:
        self._core, self._connection, self._stream = core, connection, stream
        self._start, self._progress = start, progress
        self._confirm_every_s, self._skip = confirm_every_s, skip
        self._watermark = start.watermark
        # The slot brings what it has not confirmed: the last stored transaction again,
        # unless the database is a copy that has written other log in its place.
        self._expected = start.last_lsn if stream.confirmed_before <= start.last_lsn else 0
        self._window: deque[InFlightTransaction] = deque()
        self._window_bytes = 0
        self._answers: dict[int, Frame] = {}
        self._done_lsn = self._confirmed_lsn = 0
        self._confirmed_at = time.monotonic()

    def run(self, stop: Event) -> None:
        """Relay until `stop` is set and the window is empty, or until an error."""
        while not stop.is_set() or self._window:
            if not stop.is_set():
                self._read_slot()
            self._wait()
            self._process_answers()
            if time.monotonic() - self._confirmed_at >= self._confirm_every_s:
                self._confirm()
        self._confirm()

    def _read_slot(self) -> None:
        while len(self._window) < WINDOW and self._window_bytes < WINDOW_BYTES:
            committed = self._stream.read(all_stored=not self._window)
            if committed is None:
                self._require_behind(self._stream.decoded)
                return
            self._accept(committed)

    def _accept(self, committed: CommittedTransaction) -> None:
        if (committed.lsn, committed.committed_at) == (self._expected, self._start.committed_at):
            self._expected = 0
        self._require_behind(committed.lsn)
        if committed.lsn in self._skip:
            log.error(
                "relay.skipped",
                lsn=committed.lsn,
                messages=len(committed.contents),
                xid=committed.xid,
            )
        elif committed.contents and committed.lsn > self._start.stored_lsn:
            with self._noting_failures(committed):
                self._send(committed)
            return
        self._add(InFlightTransaction(committed))

    @contextmanager
    def _noting_failures(self, committed: CommittedTransaction) -> Iterator[None]:
        """Prepare the next session for the errors that it can avoid; log the others."""
        try:
            yield
        except StaleTopic:
            for topic in _topics(committed):
                self._core.topics.refresh(topic)
            raise
        except DigestMismatch:
            self._progress.in_parts.add(committed.lsn)
            raise
        except (UnknownTransaction, SequenceGap):
            raise
        except (RequestRejected, ProtocolError) as error:
            for topic in _topics(committed) if isinstance(error, UnknownTopic) else ():
                self._core.topics.forget(topic)
            _log_refused(committed, error)
            raise

    def _require_behind(self, reached: int) -> None:
        """Raise SlotRewound if the log has passed the last stored transaction without
        it.
        """
        if 0 < self._expected < reached:
            raise SlotRewound(
                f"The broker's last transaction, at LSN {format_lsn(self._expected)}, is not in "
                "the database's log",
                hint=REWOUND.format(slot=self._stream.source.slot),
            )

    def _send(self, committed: CommittedTransaction) -> None:
        relayed = RelayedTransaction(
            self._stream.source,
            committed,
            tuple(map(unpack_emitted, committed.contents)),
            self._watermark,
        )
        attempt = first_attempt(committed, self._progress.refused_ms)
        part = None
        if committed.lsn not in self._progress.in_parts:
            part = build_whole(
                self._core, relayed, derive_token(relayed.source, committed, attempt)
            )
        if part is None:
            self._send_in_parts(relayed)
            return
        payload = pack_part(part)
        deadline = time.monotonic() + self._core.settings.timeout
        correlation = self._connection.write(Opcode.GROUP, payload, deadline)
        self._add(
            InFlightTransaction(
                committed, correlation, attempt, sum(map(len, payload)), time.monotonic()
            )
        )
        self._watermark = committed.lsn

    def _send_in_parts(self, relayed: RelayedTransaction) -> None:
        """Store a transaction while no other one is in flight."""
        while self._window:
            self._wait()
            self._process_answers()
        store_in_parts(self._core, relayed, time.monotonic() + LARGE_S)
        self._watermark = relayed.committed.lsn
        self._count_stored(relayed.committed)

    def _add(self, transaction: InFlightTransaction) -> None:
        self._window.append(transaction)
        self._window_bytes += transaction.size

    def _wait(self) -> None:
        """Wait for an answer, or for a transaction if the window has room."""
        if self._window and self._window[0].correlation is None:
            return
        sources: list[socket | SlotStream] = [self._connection.socket]
        room = len(self._window) < WINDOW and self._window_bytes < WINDOW_BYTES
        if room and not (self._window and self._stream.blocked):
            sources.append(self._stream)
        ready, _, _ = select.select(sources, [], [], POLL_S)
        if self._connection.socket in ready:
            for frame in self._connection.receive(time.monotonic() + POLL_S):
                self._answers[frame.correlation] = frame

    def _process_answers(self) -> None:
        """Remove answered transactions from the front of the window."""
        while self._window:
            transaction = self._window[0]
            if transaction.correlation is not None:
                answer = self._answers.pop(transaction.correlation, None)
                if answer is None:
                    self._require_in_time(transaction)
                    return
                self._check(transaction, answer)
            self._window.popleft()
            self._window_bytes -= transaction.size
            if transaction.correlation is None:
                self._done_lsn = transaction.committed.end_lsn
            else:
                self._count_stored(transaction.committed)

    def _require_in_time(self, transaction: InFlightTransaction) -> None:
        timeout = self._core.settings.timeout
        if time.monotonic() - transaction.sent_at > timeout:
            raise RequestTimeout(f"The broker has not answered for {timeout} s")

    def _check(self, transaction: InFlightTransaction, answer: Frame) -> None:
        """Raise unless the bundle is stored."""
        committed = transaction.committed
        try:
            with self._noting_failures(committed):
                receipt = unpack_bundle_receipt(reply_payload(answer))
        except UnknownTransaction:
            self._progress.refused_ms = max(
                self._progress.refused_ms, token_time(committed, transaction.attempt)
            )
            raise
        if BundleState(receipt.state) not in COMMITTED:
            self._progress.in_parts.add(committed.lsn)
            raise RemoteProtocolError(
                f"The broker left a bundle undecided that was sent with its decision: "
                f"its state is {receipt.state}"
            )

    def _count_stored(self, committed: CommittedTransaction) -> None:
        self._done_lsn = committed.end_lsn
        self._progress.in_parts.discard(committed.lsn)
        self._progress.transactions += 1
        self._progress.messages += len(committed.contents)
        crashpoint("relay.after_store")

    def _confirm(self) -> None:
        self._confirmed_at = time.monotonic()
        # A slot that may be rewound keeps its log, so that each session finds it out.
        if self._done_lsn > self._confirmed_lsn and not self._expected:
            self._stream.confirm(self._done_lsn)
            self._confirmed_lsn = self._done_lsn
            crashpoint("relay.after_feedback")


def read_start(core: BlockingCore, source: SlotSource) -> StartPosition:
    """Return the broker's position.

    On a new timeline it is the watermark of the latest earlier one, up to the end of
    that timeline. Raises SlotRewound if the database's log ends before the broker's
    position, or a failover has left the database behind, and the errors of a call.
    """
    _require_newest(core, source)
    lsn, committed_at = read_watermark(core, source.watermark_name(source.timeline))
    if lsn > source.end_lsn:
        raise SlotRewound(
            f"The database's log ends at LSN {format_lsn(source.end_lsn)}, but the broker has it up"
            f" to {format_lsn(lsn)}",
            hint=REWOUND.format(slot=source.slot),
        )
    if lsn:
        return StartPosition(lsn, lsn, committed_at, lsn)
    for timeline, end in reversed(source.history):
        lsn, committed_at = read_watermark(core, source.watermark_name(timeline))
        if lsn:
            return StartPosition(0, min(lsn, end), committed_at, lsn if lsn < end else 0)
    return StartPosition(0, 0, 0)


def _require_newest(core: BlockingCore, source: SlotSource) -> None:
    """Raise SlotRewound if the broker has transactions of a later timeline.

    Commits of a primary that came back after a failover are lost once it follows the
    new one.
    """
    for timeline in range(source.timeline + 1, source.timeline + 1 + LATER):
        if read_watermark(core, source.watermark_name(timeline))[0]:
            raise SlotRewound(
                f"The database is on timeline {source.timeline}, and the broker has transactions "
                f"of timeline {timeline}: a failover has left the database behind",
                hint=LEFT_BEHIND.format(slot=source.slot),
            )


def read_watermark(core: BlockingCore, name: str) -> tuple[int, int]:
    """Return the LSN and the commit time that a watermark has reached; 0, 0 = none."""
    shown = core.call("mark.show", {"name": name}, repeat=True)
    return int(shown["place"]), int(shown["at"])


def _log_refused(committed: CommittedTransaction, error: TxmqError) -> None:
    """Log a transaction that holds up all later ones, until it is skipped."""
    log.error(
        "relay.refused",
        lsn=committed.lsn,
        xid=committed.xid,
        at=committed.committed_at,
        error=str(error),
    )


def _topics(committed: CommittedTransaction) -> set[str]:
    return {unpack_emitted(content).topic for content in committed.contents}
