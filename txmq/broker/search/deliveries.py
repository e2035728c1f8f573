"""Deliveries of a few messages, read back from the log.

A delivery that did not fail leaves no row, and an ack is a range of offsets. The log
has both as long as it is kept. So who had a message is found by one pass over the log
from its publication on, in bounded steps, and nothing is written for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from txmq.core.consumers import message_lives
from txmq.core.events import base, transactions
from txmq.core.events import consumers as events
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.restores import all_epochs
from txmq.core.topics import topics
from txmq.core.transactions.model import get
from txmq.errors import CorruptRecord, StoreError
from txmq.model.bundle import COMMITTED, BundleState
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import MILLISECOND
from txmq.store.log.record import split_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.steps import Steps
    from txmq.store.log.record import Record

RECORDS_PER_STEP, STEP_BYTES = 32, 256 << 10
MAX_BYTES, MAX_RECORDS = 64 << 20, 100_000  # of one reply
MAX_FOUND = 10_000
MAX_KNOWN = 1_000  # messages in groups that the next reply is told of

ENDS: Final = {
    FailedKind.RETRY: "failed",
    FailedKind.LETTER: "failed",
    FailedKind.LOCAL: "kept at the consumer",
}
DELIVERED, PROCESSED, FILTERED = "delivered", "processed", "filtered"


class Known(NamedTuple):
    """State of a message in a group: the lease and the member that have it
    (0 = nobody), the attempts that count so far (None = unknown), and whether it is
    processed.
    """

    lease: int = 0
    member: str = ""
    attempts: int | None = None
    over: bool = False


class DeliverySearch:
    """One reply. `known` is what the reply before has told. All methods belong to the
    reactor's thread.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[MessageRef],
        start: int | None,
        known: Iterable[tuple[int, int, int, str, int | None, bool]],
        within_ms: int | None = None,
    ) -> None:
        """`within_ms` is the time of the reply; None = no limit."""
        self._engine, self._state, self._messages = engine, engine.state, messages
        self._wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, (topic_id, partition, offset) in enumerate(messages):
            self._wanted.setdefault((topic_id, partition), []).append((offset, number))
        self._published = self._first_published() if start is None else start
        self._until = None if within_ms is None else engine.now() + within_ms * MILLISECOND
        self._known = {(one[0], one[1]): Known._make(one[2:]) for one in known}
        self._found: list[dict[str, Any]] = []
        self._at = 0  # time of the record
        handlers: dict[type[base.Event], Callable[[Any], None]] = {
            events.Delivered: self._delivered,
            events.Acked: self._acked,
            events.Returned: self._returned,
            events.LeasesExpired: self._expired,
            events.MemberLeft: self._left,
            events.Retried: self._failed,
            events.DeadLettered: self._failed,
            events.Replayed: self._moved,
            events.RetriesChanged: self._moved,
            events.StoreReported: self._store_reported,
            transactions.PartStored: self._stored,
            transactions.GroupsStored: self._all_stored,
        }
        self._handlers = {base.KINDS[kind]: handler for kind, handler in handlers.items()}

    def reply(self) -> Steps[dict[str, Any]]:
        """Return the reply, in steps."""
        store = self._engine.store
        begin = max(self._published, store.first)
        until, bound = begin, begin + MAX_BYTES
        began_at: int | None = None
        following: int | None = None
        step_end = begin + STEP_BYTES
        damaged, whole = False, begin == self._published
        try:
            for number, record in enumerate(store.scan(begin), 1):
                if record.end > store.durable:
                    break
                until = record.end
                began_at = began_at or record.stored_at
                self._read(record)
                if number >= MAX_RECORDS or until >= bound or len(self._found) >= MAX_FOUND:
                    following = until
                    break
                if number % RECORDS_PER_STEP and until < step_end:
                    continue
                if self._is_all_over():
                    break
                if self._until is not None and self._engine.now() >= self._until:
                    following = until
                    break
                step_end = until + STEP_BYTES
                yield
        except CorruptRecord:
            damaged = True
        except StoreError:  # retention was faster
            following, began_at, whole = store.first, None, False
        # the scan leaps over what is known to be damaged
        leapt = any(span.position < until and span.end > begin for span in store.quarantined)
        known = [(*key, *fields) for key, fields in self._known.items()]
        return {
            "deliveries": self._found,
            "whole": whole,
            "damaged": damaged or leapt,
            "from_at": began_at,
            "until_at": self._at or None,
            "next": following,
            "known": known[:MAX_KNOWN],
        }

    def _first_published(self) -> int:
        """Return where the log begins to know of the messages; 0 = before its start."""
        found = [
            next((entry.visible_at for _base, entry in topics.entry_at(self._state, *ref)), 0)
            for ref in self._messages
        ]
        return min(found, default=0)

    def _is_all_over(self) -> bool:
        """Return True if each group is through with each message, so that no more will
        be found.
        """
        for group in self._state.groups.by_id.values():
            for number, ref in enumerate(self._messages):
                tp = TopicPartition(ref[0], ref[1])
                if tp not in group.positions or group.deleted:
                    continue
                known = self._known.get((number, group.group_id))
                if known is None or not known.over:
                    return False
                once = len(all_epochs(self._state, group, tp)) == 1
                if not once or message_lives.is_waiting(self._state, group, ref):
                    return False
        return True

    def _read(self, record: Record) -> None:
        self._at = record.stored_at
        handler = self._handlers.get(record.kind)
        if handler is None:
            return
        try:
            handler(base.decode(record.kind, split_body(record).head))
        except base.UnknownEvent:  # of another version
            return

    def _in(self, ranges: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the numbers of the wanted messages in some ranges, each with its
        range.
        """
        for one in ranges:
            for offset, number in self._wanted.get((one[0], one[1]), ()):
                if one[2] <= offset < one[3]:
                    yield number, one

    def _among(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the numbers of the wanted messages among some rows, each with its
        row.
        """
        for one in rows:
            for offset, number in self._wanted.get((one[0], one[1]), ()):
                if one[2] == offset:
                    yield number, one

    def _add(self, number: int, group_id: int, what: str, **fields: object) -> None:
        group = self._state.groups.by_id.get(group_id)
        if group is None:
            return
        known = self._known.get((number, group_id), Known())
        added = {"message": number, "group": group.name, "at": self._at, "what": what}
        self._found.append(added | {"consumer": known.member, "attempt": None} | fields)

    def _delivered(self, event: events.Delivered) -> None:
        group, lease, member = event.group_id, event.lease, event.member
        self._moved(event)
        for number, one in self._in(event.ranges):
            self._note(number, group, lease, member, one[4])
        for number, _row in self._among(event.rows):
            before = self._known.get((number, group), Known()).attempts
            self._note(number, group, lease, member, None if before is None else before + 1)
        for number, _one in (*self._in(event.expired), *self._among(event.expired_rows)):
            self._end(number, group, "expired", over=True)
        for number, _one in self._in(event.unwanted):
            self._end(number, group, FILTERED, over=True)

    def _note(
        self, number: int, group_id: int, lease: int, member: str, attempt: int | None
    ) -> None:
        self._known[number, group_id] = Known(lease, member, attempt)
        self._add(number, group_id, DELIVERED, attempt=attempt)

    def _end(self, number: int, group_id: int, what: str, *, over: bool = False) -> None:
        """Note the end of a delivery; `over`: the group has processed the message."""
        known = self._known.get((number, group_id), Known())
        self._add(number, group_id, what, attempt=known.attempts)
        self._known[number, group_id] = known._replace(lease=0, member="", over=over)

    def _acked(self, event: events.Acked) -> None:
        for number, _one in (*self._in(event.ranges), *self._among(event.rows)):
            self._end(number, event.group_id, PROCESSED, over=True)
        for number, _one in (*self._in(event.filtered), *self._among(event.filtered_rows)):
            self._end(number, event.group_id, FILTERED, over=True)
        self._moved(event)

    def _returned(self, event: events.Returned) -> None:
        for number, _one in (*self._in(event.ranges), *self._among(event.rows)):
            self._end(number, event.group_id, "returned")
            self._uncount(number, event.group_id)

    def _uncount(self, number: int, group_id: int) -> None:
        known = self._known[number, group_id]
        if known.attempts:
            self._known[number, group_id] = known._replace(attempts=known.attempts - 1)

    def _expired(self, event: events.LeasesExpired) -> None:
        leases = set(event.leases)
        for (number, group_id), known in list(self._known.items()):
            if group_id == event.group_id and known.lease in leases:
                self._end(number, group_id, "lease expired")

    def _left(self, event: events.MemberLeft) -> None:
        for (number, group_id), known in list(self._known.items()):
            if group_id == event.group_id and known.lease and known.member == event.member:
                self._end(number, group_id, "consumer lost" if event.lost else "consumer left")

    def _failed(self, event: events.Retried | events.DeadLettered) -> None:
        postponed = isinstance(event, events.Retried) and not event.failed
        for number, move in self._among(event.moves):
            if self._known.get((number, event.group_id), Known()).lease:
                what = ENDS.get(FailedMessage(*move[3]).kind)  # type: ignore[call-overload]
                if what is not None:
                    self._end(number, event.group_id, "postponed" if postponed else what)
        self._moved(event)

    def _moved(self, event: Any) -> None:  # noqa: ANN401  # an event with moves
        """Note the attempts that count in the new rows of messages."""
        for number, move in self._among(event.moves):
            row = FailedMessage(*move[3])
            known = self._known.get((number, event.group_id), Known())
            attempts = 0 if row.kind == FailedKind.LETTER else row.attempt
            self._known[number, event.group_id] = known._replace(attempts=attempts, over=False)

    def _store_reported(self, event: events.StoreReported) -> None:
        for number, _row in self._among(event.settled):
            self._end(number, event.group_id, PROCESSED, over=True)
        for number, _row in self._among(event.returned):
            self._end(number, event.group_id, "returned")
        self._failed_at_store(event)

    def _failed_at_store(self, event: events.StoreReported) -> None:
        failed = set(event.failed)
        for number, move in self._among(event.moves):
            what = ENDS.get(FailedMessage(*move[3]).kind)  # type: ignore[call-overload]
            if what is not None and self._known.get((number, event.group_id), Known()).lease:
                self._end(number, event.group_id, what)
            elif tuple(move[:3]) in failed:
                self._add(number, event.group_id, "failed")
        self._moved(event)

    def _all_stored(self, event: transactions.GroupsStored) -> None:
        for one in event.groups:
            self._stored(transactions.PartStored(*one))

    def _stored(self, event: transactions.PartStored) -> None:
        """Note acks in a transaction. The messages are processed once it is committed;
        a rollback gives them back.
        """
        row = get(self._state, event.token)
        over = row is not None and row.state in COMMITTED
        undone = row is not None and row.state is BundleState.ROLLED_BACK
        what = "ack rolled back" if undone else "acked in a transaction"
        action: Any
        for action in event.actions:
            if action[0] != "ack":
                continue
            _kind, name, member, _generation, topic, partition, start, end = action
            group = self._state.groups.by_name.get(name)
            found = self._state.topics.get(topic)
            if group is None or found is None:
                continue
            span = (found.topic_id, partition, start, end)
            for number, _one in self._in([span]):
                token = event.token.hex()
                self._add(number, group.group_id, what, consumer=member, token=token)
                known = self._known.get((number, group.group_id), Known())
                self._known[number, group.group_id] = known._replace(lease=0, over=over)
