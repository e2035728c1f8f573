"""Delayed messages: stored, and in no topic before they are due.

Each is a batch of its own, so that it can be published, recalled and found by itself.
Table `delayed` has its row by the time when it is due, `delayed_ids` leads from its id
to the row, and `delayed_at` keeps its position in the log. A recall leaves the id
behind for a while, so that it can be repeated (`recalled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

RECALLED_MARKER = 0  # in place of a time in table `delayed_ids`
DelayedId = tuple[bytes, int]  # producer id or token, sequence


class DelayedMessage(NamedTuple):
    """A row of table `delayed`. Its key is (due, position at which it was stored
    first).

    The message's id is `producer` (the producer id, or the token) and `sequence`.
    `moved_to` is the position of its latest copy; 0 = it was never copied. `duration`
    is the wait that the sender asked for; 0 = the sender gave a time.
    """

    topic_id: int
    partition: int
    length: int
    tag_filter: int
    key_hash: int | None
    producer: bytes
    sequence: int
    moved_to: int = 0
    duration: int = 0


class ScheduledMessage(NamedTuple):
    """A delayed message with its key: `position` is where it was stored first."""

    due: int
    position: int
    message: DelayedMessage

    @property
    def log_position(self) -> int:
        """The position of the message in the log, or of its latest copy."""
        return self.message.moved_to or self.position


def put(state: State, due: int, position: int, message: DelayedMessage) -> None:
    """Apply: add a message that waits until it is due."""
    state.tables[t.DELAYED].put(t.DELAYED_KEY.pack(due, position), message)
    state.tables[t.DELAYED_IDS].put(
        t.MESSAGE_KEY.pack(message.producer, message.sequence), (due, position)
    )
    state.tables[t.DELAYED_AT].put(t.PIN_KEY.pack(position), (due, position))
    state.delayed_count += 1


def remove(state: State, due: int, position: int) -> DelayedMessage:
    """Apply: remove a message that is published, queued or recalled, and return it."""
    message = _get(state, due, position)
    state.tables[t.DELAYED].delete(t.DELAYED_KEY.pack(due, position))
    state.tables[t.DELAYED_IDS].delete(t.MESSAGE_KEY.pack(message.producer, message.sequence))
    state.tables[t.DELAYED_AT].delete(t.PIN_KEY.pack(message.moved_to or position))
    state.delayed_count -= 1
    return message


def set_back(state: State, back: int, now: int) -> None:
    """Apply: the time is `now`, and was later by `back`. Durations that began in
    between end as much earlier; times that senders gave stay.
    """
    for due, position, message in list(scan(state, now + 1)):
        if message.duration and due - message.duration > now:
            remove(state, due, position)
            put(state, max(due - back, now), position, message._replace(moved_to=0))
            if message.moved_to:
                set_position(state, max(due - back, now), position, message.moved_to)


def set_position(state: State, due: int, position: int, to: int) -> None:
    """Apply: note the position of a message's copy. Its turn stays the same."""
    message = _get(state, due, position)
    state.tables[t.DELAYED_AT].delete(t.PIN_KEY.pack(message.moved_to or position))
    state.tables[t.DELAYED_AT].put(t.PIN_KEY.pack(to), (due, position))
    state.tables[t.DELAYED].put(t.DELAYED_KEY.pack(due, position), message._replace(moved_to=to))


def stored_below(state: State, limit: int) -> Iterator[ScheduledMessage]:
    """Yield the messages at log positions below `limit`, lowest first."""
    for _key, (due, position) in state.tables[t.DELAYED_AT].range(b"", t.PIN_KEY.pack(limit)):
        yield ScheduledMessage(due, position, _get(state, due, position))


def recall(state: State, message_id: DelayedId, at: int) -> None:
    """Apply: remove a message, and note its recall."""
    scheduled = find(state, message_id)
    assert scheduled is not None, "only waiting messages are recalled"
    remove(state, scheduled.due, scheduled.position)
    state.tables[t.DELAYED_IDS].put(t.MESSAGE_KEY.pack(*message_id), (RECALLED_MARKER, at))
    state.tables[t.RECALLED].put(t.RECALLED_KEY.pack(at, *message_id), ())


def forget_recall(state: State, at: int, message_id: DelayedId) -> None:
    """Apply: forget a recall."""
    state.tables[t.RECALLED].delete(t.RECALLED_KEY.pack(at, *message_id))
    state.tables[t.DELAYED_IDS].delete(t.MESSAGE_KEY.pack(*message_id))


def find(state: State, message_id: DelayedId) -> ScheduledMessage | None:
    """Return the message of an id while it waits."""
    row = state.tables[t.DELAYED_IDS].get(t.MESSAGE_KEY.pack(*message_id))
    if row is None or row[0] == RECALLED_MARKER:
        return None
    return ScheduledMessage(row[0], row[1], _get(state, row[0], row[1]))


def is_unchanged(state: State, scheduled: ScheduledMessage) -> bool:
    """Return whether a message still waits at the same position."""
    row = state.tables[t.DELAYED].get(t.DELAYED_KEY.pack(scheduled.due, scheduled.position))
    return row is not None and DelayedMessage(*row) == scheduled.message


def was_recalled(state: State, message_id: DelayedId) -> bool:
    """Return whether a message was recalled and the recall is not forgotten yet."""
    row = state.tables[t.DELAYED_IDS].get(t.MESSAGE_KEY.pack(*message_id))
    return row is not None and row[0] == RECALLED_MARKER


def scan(
    state: State, start: int = 0, stop: int | None = None, position: int = 0
) -> Iterator[ScheduledMessage]:
    """Yield the messages with (due, position) from (`start`, `position`) on and due
    before `stop`, the earliest first.
    """
    end = None if stop is None else t.DELAYED_KEY.pack(stop, 0)
    for key, row in state.tables[t.DELAYED].range(t.DELAYED_KEY.pack(start, position), end):
        due, at = t.DELAYED_KEY.unpack(key)
        yield ScheduledMessage(due, at, DelayedMessage(*row))


def lowest_position(state: State) -> int | None:
    """Return the lowest log position of a delayed message."""
    return next(
        (t.PIN_KEY.unpack(key)[0] for key, _row in state.tables[t.DELAYED_AT].range(b"")), None
    )


def recalls_before(state: State, at: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield (recalled at, producer, sequence) of recalls before `at`, the oldest
    first.
    """
    for key, _row in state.tables[t.RECALLED].range(b"", t.RECALLED_KEY.pack(at, bytes(16), 0)):
        yield t.RECALLED_KEY.unpack(key)


def _get(state: State, due: int, position: int) -> DelayedMessage:
    row = state.tables[t.DELAYED].get(t.DELAYED_KEY.pack(due, position))
    assert row is not None, "an index leads to the row"
    return DelayedMessage(*row)
