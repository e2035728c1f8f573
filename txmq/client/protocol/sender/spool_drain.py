"""The drain of a spool: its batches go to the broker in their order, and keep the
sequences that they have.

So the broker recognises a batch that was sent before, by this process or another one.
At most one producer session is in flight: within it the broker refuses whatever follows
a batch that is missing. A refusal is handled when all replies are there. Whatever it
changes is on disk before anything is sent again (`txmq.recover.local.batches`).

A session continues behind a batch that was put aside: the broker is told to skip it.
So a message keeps its id, and all copies of a spool send the same.

The caller does the I/O: it writes `next_writes`, brings replies to `receive`, refreshes
`unknown_topics`, searches for `in_doubt`, and tells the broker of `to_skip`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from txmq.batch import read_header
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import Conversation, Payload, reply_payload
from txmq.client.protocol.sender.batches import (
    DEFINITELY_NOT_STORED,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    parse_receipt,
)
from txmq.client.protocol.sender.in_flight import MAX_BATCHES_IN_FLIGHT, WRITE_BYTES
from txmq.client.protocol.sender.multi_send import MAX_BATCHES, TARGET_BYTES
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    BrokerFailed,
    LocalProtocolError,
    MessageTooLarge,
    ProducerFenced,
    RemoteProtocolError,
    RequestRejected,
    SequenceGap,
    StaleTopic,
    Throttled,
    TxmqError,
    UnknownPartition,
    UnknownProducer,
)
from txmq.model.message import message_id
from txmq.recover.local.batches import UNROUTED, Refusal, SpooledBatch
from txmq.recover.local.spool import Spool, ToSend
from txmq.wire.batched import BatchedReply, pack_requests, unpack_replies
from txmq.wire.data_requests import Opcode, send_header
from txmq.wire.frames import Frame
from txmq.wire.status import OK

log = get_logger()
MAX_FAILURES = 10  # of the broker over one batch, until it counts as refused
MARK_EVERY = 64  # batches; the broker remembers the receipts of 256


class _State(Enum):
    UNSENT = auto()
    SENT = auto()
    DONE = auto()
    REFUSED = auto()


@dataclass(slots=True)
class _Entry:
    """A batch in the window. `doubtful`: an earlier attempt may have been stored.
    `rerouted`: its partition was chosen anew after a refusal. `searched`: it was not
    stored before it is sent now; `end_searched`: its last row was not.
    """

    batch: SpooledBatch
    doubtful: bool
    rerouted: bool = False
    searched: bool = False
    end_searched: bool = False
    failures: int = 0  # times that the broker failed over it
    state: _State = _State.UNSENT
    error: TxmqError | None = None


class InDoubt(NamedTuple):
    """A message of which only a search can tell whether it is stored."""

    topic: str
    message_id: str


class Skip(NamedTuple):
    """A session of which nothing before `sequence` will be sent any more."""

    session: bytes
    epoch: int
    sequence: int


class SpoolDrain:
    """The drain of one spool over one connection at a time. For one thread.

    Calls may raise DiskFull: nothing is lost then, and they may be made again.
    `unknown_topics` are to be refreshed before their messages go out. `in_doubt` is a
    message that is to be searched, and then `settle` or `search_refused` called.
    `to_skip` is what the broker is to be told, and then `skipped` called. `halted` is
    an error that ends the drain for this client.
    """

    def __init__(self, spool: Spool, topics: TopicCache) -> None:
        self._spool, self._topics = spool, topics
        self._read_to = spool.drained
        self._records: Iterator[ToSend] = iter(())
        self._window: deque[_Entry] = deque()
        self._requests: dict[int, list[_Entry]] = {}
        self._handed = 0  # entries at the beginning of the window that are not to be sent
        self._refused = 0  # entries of that state
        self._session = b""  # of those that were sent
        self._unmarked = self._unmarked_batches = 0  # drained, and not yet noted
        self._done_to = spool.drained
        self._refused_topics: dict[str, TxmqError] = {}
        self._pause = FIRST_PAUSE_S
        self._warned: set[tuple[str, str]] = set()
        self.unknown_topics: set[str] = set()
        self.in_doubt: InDoubt | None = None
        self.to_skip: Skip | None = None
        self.halted: TxmqError | None = None
        self.paused_until = 0.0

    @property
    def all_sent(self) -> bool:
        """True where nothing waits but replies: new messages may follow."""
        return (
            self._handed == len(self._window)
            and not self._refused
            and self._read_to >= self._spool.end
        )

    @property
    def done(self) -> bool:
        """True where everything is drained."""
        return not self._window and self._read_to >= self._spool.end

    @property
    def may_ask(self) -> bool:
        """True if calls are to be made now before the drain can go on."""
        wanted = self.in_doubt or self.to_skip or self.unknown_topics
        return bool(wanted) and time.monotonic() >= self.paused_until

    @property
    def awaits_replies(self) -> bool:
        """True while any request is in flight."""
        return bool(self._requests)

    def next_writes(self, conversation: Conversation) -> list[bytes]:
        """Return the bytes to write next, about as many as one write takes."""
        writes: list[bytes] = []
        size = 0
        while size < WRITE_BYTES and self._can_send() and (entries := self._next()):
            parts = [self._payload(entry.batch) for entry in entries]
            payload: Payload = parts[0]
            if len(entries) > 1:
                payload = b"".join(pack_requests([b"".join(part) for part in parts]))
            opcode = Opcode.SENDS if len(entries) > 1 else Opcode.SEND
            try:
                correlation, own = conversation.request(opcode, payload)
            except MessageTooLarge as error:  # for a frame of this broker
                self._set_refused(entries[0], error)
                break
            self._requests[correlation] = entries
            for entry in entries:
                entry.state = _State.SENT
            writes += own
            size += sum(map(len, own))
        self._handle_refusal_if_any()
        return writes

    def _payload(self, batch: SpooledBatch) -> tuple[bytes, bytes]:
        header = send_header(batch.topic, batch.partition, batch.epoch)
        return header, batch.encoded

    def _can_send(self) -> bool:
        return (
            not (self._refused or self.in_doubt or self.to_skip)
            and not (self.halted or self.unknown_topics)
            and self._handed < MAX_BATCHES_IN_FLIGHT
            and time.monotonic() >= self.paused_until
        )

    def _next(self) -> list[_Entry]:
        """Return the entries of the next request, none while they have to wait."""
        most = min(MAX_BATCHES, MAX_BATCHES_IN_FLIGHT - self._handed)
        entries: list[_Entry] = []
        size = 0
        while size < TARGET_BYTES and len(entries) < most:
            if self._handed == len(self._window) and not self._read_more():
                break
            entry = self._window[self._handed]
            if entry.state is _State.UNSENT:
                if not self._is_ready(entry, alone=not (entries or self._requests)):
                    break
                if entries and len(entry.batch.encoded) > TARGET_BYTES:
                    break
                entries.append(entry)
                size += len(entry.batch.encoded)
            self._handed += 1
        return entries

    def _read_more(self) -> bool:
        """Bring the batches of the next record into the window."""
        while True:
            record = next(self._records, None)
            if record is None:
                end = self._spool.end
                if self._read_to >= end:
                    return False
                self._records = self._spool.read(self._read_to)
                record = next(self._records, None)
                if record is None:  # notes only
                    self._read_to = end
                    return False
            self._read_to = record.end
            for batch in record.batches:
                doubtful = batch.doubtful or batch.position < self._spool.found_to
                self._window.append(_Entry(batch, doubtful))
            if record.batches:
                return True

    def _is_ready(self, entry: _Entry, *, alone: bool) -> bool:
        """Return whether an entry may be sent now, and route it.

        `alone`: nothing is in flight.
        """
        batch = entry.batch
        if not alone and batch.session != self._session:
            return False
        if entry.doubtful and not (batch.sequence or entry.searched):
            # A broker that has forgotten the session would take it for a new one.
            if alone:
                self._doubt(entry)
            return False
        if batch.partition == UNROUTED and not self._route(entry, alone=alone):
            return False
        self._session = batch.session
        return True

    def _route(self, entry: _Entry, *, alone: bool) -> bool:
        """Choose the partition of a row. Return False where it cannot be sent now."""
        topic = entry.batch.topic
        metadata = self._topics.cached(topic)
        refusal: TxmqError
        if metadata is not None:
            try:
                partition = self._topics.choose_partition(metadata, entry.batch.key())
            except BaseException as error:  # noqa: BLE001  # of the user's partitioner: no exit here
                refusal = LocalProtocolError(
                    f"the partitioner raised {type(error).__name__}",
                    hint="mend the partitioner, then send again what was refused",
                )
            else:
                entry.batch = entry.batch._replace(partition=partition, epoch=metadata.epoch)
                return True
        elif (known := self._refused_topics.get(topic)) is not None:
            refusal = known
        else:
            if alone:
                self.unknown_topics.add(topic)
            return False
        if alone:
            self._refuse(entry, refusal)
        return False

    def topic_refreshed(self, topic: str, error: TxmqError | None = None) -> None:
        """Go on with a topic that was refreshed, or that the broker refuses."""
        self.unknown_topics.discard(topic)
        self._refused_topics.pop(topic, None)
        if error is not None:
            self._refused_topics[topic] = error

    def receive(self, replies: Iterable[Frame]) -> None:
        """Handle replies; those to the requests of others are ignored."""
        for reply in replies:
            entries = self._requests.pop(reply.correlation, None)
            if entries is not None:
                self._answer(entries, reply)
        self._pop_done()
        self._handle_refusal_if_any()

    def _answer(self, entries: list[_Entry], reply: Frame) -> None:
        try:
            payload = reply_payload(reply)
            answers = (
                [BatchedReply(OK, payload)] if len(entries) == 1 else _unpack(payload, len(entries))
            )
        except TxmqError as error:
            for entry in entries:
                self._set_refused(entry, error)
            return
        for entry, answer in zip(entries, answers, strict=True):
            try:
                parse_receipt(reply_payload(answer))
            except TxmqError as error:
                self._set_refused(entry, error)
            else:
                entry.state = _State.DONE
                self._pause = FIRST_PAUSE_S

    def _set_refused(self, entry: _Entry, error: TxmqError) -> None:
        entry.state, entry.error = _State.REFUSED, error
        self._refused += 1

    def _pop_done(self) -> None:
        """Take the drained batches off the beginning of the window, and note them."""
        window = self._window
        while window and window[0].state is _State.DONE:
            entry = window.popleft()
            self._handed = max(0, self._handed - 1)
            self._unmarked += entry.batch.count
            self._unmarked_batches += 1
            self._done_to = window[0].batch.position if window else entry.batch.end
        if self._unmarked_batches >= MARK_EVERY or not self._requests:
            self.mark()

    def mark(self) -> None:
        """Note in the spool what is drained."""
        if self._unmarked_batches:
            messages, self._unmarked, self._unmarked_batches = self._unmarked, 0, 0
            self._spool.mark_drained(self._done_to, messages)

    def _handle_refusal_if_any(self) -> None:
        if self._refused and not (self._requests or self.in_doubt or self.to_skip):
            self._handle_refusal()

    def _handle_refusal(self) -> None:
        """Handle the first refused batch, once all replies are there. Those behind it
        may have been refused because of it, and are sent again.
        """
        head = self._window[0]
        error = head.error
        assert error is not None, "a refused batch has its error"
        match error:
            case ProducerFenced():
                self.halted = error
            case StaleTopic():
                self._reroute(head)
            case UnknownPartition() if not (head.batch.explicit or head.rerouted):
                self._reroute(head)
            case UnknownProducer():  # a copy of the spool may have sent it
                self._doubt(head)
            case SequenceGap():
                if not self._spool.refused_before(head.batch):  # the broker has lost it
                    self._warn(head.batch.topic, error, "spool.gap")
                self._skip(head)
            case MessageTooLarge() if head.batch.count > 1:
                self._split(head)
            case BrokerFailed() if head.failures < MAX_FAILURES:
                head.failures += 1
                self.pause()
                self._send_again()
            case _ if error.retriable:
                self.pause(error.retry_after_s if isinstance(error, Throttled) else 0.0)
                self._send_again()
            case _:
                self._refuse(head, error)

    def pause(self, least_s: float = 0.0) -> None:
        """Send nothing for a while, longer each time until a receipt comes."""
        self.paused_until = time.monotonic() + max(least_s, self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _doubt(self, head: _Entry) -> None:
        """Have a batch searched: its last row, and if that is not there, its first one.

        A copy of the spool may have split the batch, and sent some rows.
        """
        batch = head.batch
        row = 0 if head.end_searched else batch.count - 1
        self.in_doubt = InDoubt(batch.topic, message_id(batch.session, batch.sequence + row))

    def settle(self, *, stored: bool) -> None:
        """Go on after the search for `in_doubt`, which has found it or not."""
        head = self._window[0]
        self.in_doubt = None
        if stored and head.end_searched:
            self._split(head)
        elif stored:
            self._refused -= head.state is _State.REFUSED
            head.state = _State.DONE
        elif head.batch.count > 1 and not head.end_searched:
            head.end_searched = True
            self._doubt(head)
        elif head.state is _State.REFUSED and self._is_passed(head):
            self._pass(head)
        elif head.state is _State.REFUSED:
            self._skip(head)
        else:
            head.searched = True
        self.receive(())

    def search_refused(self, error: TxmqError) -> None:
        """Put aside what is `in_doubt`: the broker will never tell whether it is
        stored.
        """
        self.in_doubt = None
        self._refuse(self._window[0], error, unknown=True)
        self.receive(())

    def _is_passed(self, head: _Entry) -> bool:
        """Return whether the session is beyond a message that is not stored."""
        assert head.error is not None, "a refused batch has its error"
        last = getattr(head.error, "detail", {}).get("last")
        return isinstance(last, int) and last >= head.batch.sequence

    def _pass(self, head: _Entry) -> None:
        """Put aside what a copy of the spool has put aside."""
        if head.batch.count > 1:  # the copy may have sent some of its rows
            self._split(head)
            return
        error = RequestRejected(
            "a copy of this spool has put the message aside, or it was removed by retention",
            hint="send it again (txmq recover drain --refused) if it is not in its topic",
        )
        self._refuse(head, error, unknown=True)

    def _skip(self, head: _Entry) -> None:
        """Have the session go on with this batch, whatever is missing before it."""
        batch = head.batch
        self.to_skip = Skip(batch.session, read_header(batch.encoded).epoch, batch.sequence)

    def skipped(self, error: TxmqError | None = None) -> None:
        """Go on after the broker was told of `to_skip`. What it refuses to skip to is
        put aside.
        """
        self.to_skip = None
        if error is None:
            self._send_again()
        else:
            self._refuse(self._window[0], error)

    def _reroute(self, head: _Entry) -> None:
        batch = head.batch
        if batch.count > 1 and "last" in getattr(head.error, "detail", ()):
            self._split(head)  # a copy of the spool has sent some of its rows
            return
        head.rerouted = True
        metadata = self._topics.cached(batch.topic)
        if metadata is not None and metadata.epoch == batch.epoch:
            self._topics.forget(batch.topic)
        if batch.explicit:
            head.batch = batch._replace(epoch=0)  # any: the sender named the partition
        elif batch.count == 1:
            head.batch = batch._replace(partition=UNROUTED)
        else:
            self._split(head)
        self._send_again()

    def _split(self, head: _Entry) -> None:
        self._spool.split(head.batch)
        rows = [_Entry(row, head.doubtful, head.rerouted) for row in head.batch.rows()]
        self._window.popleft()
        self._window.extendleft(reversed(rows))
        self._send_again()

    def _refuse(self, head: _Entry, error: TxmqError, *, unknown: bool = False) -> None:
        """Put a batch aside for good, and have those behind it sent again."""
        unknown |= head.doubtful and not isinstance(error, DEFINITELY_NOT_STORED)
        now = time.time_ns() // 1_000
        refusal = Refusal(
            type(error).__name__, error.message, now, "unknown" if unknown else "not done"
        )
        self._spool.refuse(head.batch, refusal)
        self._warn(head.batch.topic, error)
        self._send_again()
        head.state = _State.DONE
        self._pop_done()

    def _warn(self, topic: str, error: TxmqError, event: str = "spool.refused") -> None:
        """Log a refusal, once for each topic and kind of error."""
        kind = (topic, type(error).__name__)
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(event, topic=topic, error=str(error), spool=self._spool.path)

    def _send_again(self) -> None:
        """Have all batches without a receipt sent again, in their order."""
        for entry in self._window:
            if entry.state is not _State.DONE:
                entry.state, entry.error = _State.UNSENT, None
        self._handed = self._refused = 0

    def connection_lost(self) -> None:
        """Have everything in flight sent again on another connection."""
        self._requests.clear()
        self._refused_topics.clear()
        self.unknown_topics.clear()
        self.in_doubt = self.to_skip = None
        for entry in self._window:
            entry.doubtful = entry.doubtful or entry.state is _State.SENT
            entry.searched = entry.end_searched = False
        self._send_again()
        self.mark()


def _unpack(payload: bytes, count: int) -> list[BatchedReply]:
    try:
        return list(unpack_replies(payload, count))
    except RemoteProtocolError as error:
        error.outcome = "unknown"
        raise
