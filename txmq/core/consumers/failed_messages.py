"""Messages that left their place in the topic: retried, parked behind a fence, dead,
abandoned (table `moved`).

One row a message, found by its origin (group, topic, partition, offset), which it keeps
through retry, letter and replay. The row points at the stored batch; nothing is copied.
Indexes follow the row's kind and are kept here, nowhere else: RETRY is in `retries` and
`wakes` while nobody has it, PARKED in `parked`, LETTER and ABANDONED in `letters`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import cloning, poison
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.consumer_groups import Group, Spot, Spotted
    from txmq.core.state.state import State


class Kind(IntEnum):
    """What became of a message that was not acked."""

    RETRY = 1
    PARKED = 2
    LETTER = 3
    ABANDONED = 4


PENDING = (Kind.RETRY, Kind.PARKED)  # what is to be delivered again


class Moved(NamedTuple):
    """A row of table `moved`.

    `attempt` counts the deliveries so far (since the last replay) that count, `deaths`
    the consumers that were lost with it (`suspects`). `position`, `length` and `row`
    point at the message, `visible_at` and `stored_at` are its entry's. `token` is the
    undecided transaction that acks or replays it. `number` is its place among the
    letters.
    """

    kind: int
    attempt: int
    due: int
    key_hash: int | None
    position: int
    length: int
    row: int
    visible_at: int
    stored_at: int
    consumer: str = ""
    error_type: str = ""
    error_text: str = ""
    fingerprint: str = ""
    first_failed_at: int = 0
    dead_at: int = 0
    number: int = 0
    replays: int = 0
    deaths: int = 0
    token: bytes = b""
    reason: str = ""


class Move(NamedTuple):
    """Part of an event: the message at this place becomes this row, whatever held it
    before.
    """

    topic_id: int
    partition: int
    offset: int
    row: Moved


def row_of(
    entry: t.Entry, row: int, key_hash: int | None, *, attempt: int, deaths: int = 0
) -> Moved:
    """A message of a published batch as a row; its kind is for the caller to say."""
    return Moved(
        Kind.RETRY,
        attempt,
        0,
        key_hash,
        entry.position,
        entry.length,
        row,
        entry.visible_at,
        entry.stored_at,
        deaths=deaths,
    )


def of(move: Any) -> Move:  # nested tuples come back from the log without their names
    """A `Move` as it was recorded."""
    topic_id, partition, offset, row = move
    return Move(topic_id, partition, offset, Moved(*row))


def get(state: State, group: Group, spotted: Spotted) -> Moved | None:
    """The row of a message, if it has left its place."""
    row: Any = state.tables[t.MOVED].get(t.MOVED_KEY.pack(group.group_id, *spotted))
    return None if row is None else Moved(*row)


def put(state: State, group: Group, spotted: Spotted, row: Moved) -> None:
    """Apply: set the row and its indexes; the earlier row's were removed with
    `drop`.
    """
    state.tables[t.MOVED].put(t.MOVED_KEY.pack(group.group_id, *spotted), tuple(row))
    if row.kind == Kind.RETRY:
        if spotted not in group.held_rows and not row.token:
            _index_retry(state, group, spotted, row)
    elif row.kind == Kind.PARKED:
        state.tables[t.PARKED].put(_parked_key(group, spotted, row), ())
        _count_parked(state, group, spotted, row, 1)
    else:
        state.tables[t.LETTERS].put(t.LETTER_KEY.pack(group.group_id, row.number), spotted)
        _count_letters(state, group, row, 1)


def drop(state: State, group: Group, spotted: Spotted) -> Moved | None:
    """Apply: forget the row and its indexes; returns what it was."""
    row = get(state, group, spotted)
    if row is None:
        return None
    state.tables[t.MOVED].delete(t.MOVED_KEY.pack(group.group_id, *spotted))
    if group.clones and row.kind in PENDING:
        cloning.keep(state, group, spotted)
    if row.kind == Kind.RETRY:
        if spotted not in group.held_rows and not row.token:
            _unindex_retry(state, group, spotted, row.due)
    elif row.kind == Kind.PARKED:
        state.tables[t.PARKED].delete(_parked_key(group, spotted, row))
        _count_parked(state, group, spotted, row, -1)
    else:
        state.tables[t.LETTERS].delete(t.LETTER_KEY.pack(group.group_id, row.number))
        _count_letters(state, group, row, -1)
    return row


def _index_retry(state: State, group: Group, spotted: Spotted, row: Moved) -> None:
    (topic_id, partition, offset), due = spotted, row.due
    if row.deaths >= poison.ALONE:
        group.loners[spotted] = due
    state.tables[t.RETRIES].put(
        t.RETRY_KEY.pack(group.group_id, topic_id, partition, due, offset), ()
    )
    state.tables[t.WAKES].put(t.WAKE_KEY.pack(due, group.group_id, *spotted), ())
    group.retrying[topic_id, partition] += 1
    state.consumers.dirty_groups.add(group.group_id)


def _unindex_retry(state: State, group: Group, spotted: Spotted, due: int) -> None:
    topic_id, partition, offset = spotted
    group.loners.pop(spotted, None)
    state.tables[t.RETRIES].delete(
        t.RETRY_KEY.pack(group.group_id, topic_id, partition, due, offset)
    )
    state.tables[t.WAKES].delete(t.WAKE_KEY.pack(due, group.group_id, *spotted))
    group.retrying[topic_id, partition] -= 1
    if not group.retrying[topic_id, partition]:
        del group.retrying[topic_id, partition]
    state.consumers.dirty_groups.add(group.group_id)


def _parked_key(group: Group, spotted: Spotted, row: Moved) -> bytes:
    """In the order of publication: offsets alone would not do where a key has been in
    two partitions.
    """
    topic_id, partition, offset = spotted
    assert row.key_hash is not None, "parked, so it has a key"
    return t.PARKED_KEY.pack(
        group.group_id, topic_id, row.key_hash + t.SIGN, row.visible_at, partition, offset
    )


def _count_parked(state: State, group: Group, spotted: Spotted, row: Moved, change: int) -> None:
    fence = group.fence(spotted[0], row.key_hash)
    if fence is not None and row.key_hash is not None:
        fence.parked += change
        state.consumers.dirty_fences.add((group.group_id, spotted[0], row.key_hash))


def _count_letters(state: State, group: Group, row: Moved, change: int) -> None:
    if row.kind == Kind.LETTER:
        group.letters += change
        state.consumers.dirty_groups.add(group.group_id)


def between(
    state: State, group: Group, spot: Spot, start: int, end: int, most: int | None = None
) -> list[tuple[Spotted, Moved]]:
    """Rows of messages of one partition with start <= offset < end, in their order; the
    first so many of them.
    """
    low, high = (
        t.MOVED_KEY.pack(group.group_id, *spot, min(offset, t.SIGN)) for offset in (start, end)
    )
    rows: Any = state.tables[t.MOVED].range(low, high)
    return [((*spot, t.MOVED_KEY.unpack(key)[3]), Moved(*row)) for key, row in islice(rows, most)]


def of_group(
    state: State, group: Group, most: int | None, start: Spotted = (0, 0, 0)
) -> list[Spotted]:
    """Messages of a group that have rows, in order from that one on; at most so many of
    them.
    """
    low, high = (
        t.MOVED_KEY.pack(group.group_id, *start),
        t.MOVED_KEY.pack(group.group_id + 1, 0, 0, 0),
    )
    return [
        t.MOVED_KEY.unpack(key)[1:]
        for key, _row in islice(state.tables[t.MOVED].range(low, high), most)
    ]


def due_rows(state: State, group: Group, spot: Spot, now: int) -> Iterator[tuple[Spotted, Moved]]:
    """Rows of one partition whose next delivery is due, the longest due first."""
    start = t.RETRY_KEY.pack(group.group_id, *spot, 0, 0)
    stop = t.RETRY_KEY.pack(group.group_id, *spot, now + 1, 0)
    for key, _row in state.tables[t.RETRIES].range(start, stop):
        spotted = (*spot, t.RETRY_KEY.unpack(key)[4])
        row = get(state, group, spotted)
        assert row is not None, "in the index, so it is there"
        yield spotted, row


def first_parked(
    state: State, group: Group, topic_id: int, key_hash: int
) -> tuple[Spotted, Moved] | None:
    """The earliest message parked behind a key's fence."""
    start = t.PARKED_KEY.pack(group.group_id, topic_id, key_hash + t.SIGN, 0, 0, 0)
    stop = t.PARKED_KEY.pack(group.group_id, topic_id, key_hash + t.SIGN, t.SIGN, 0, 0)
    for key, _row in state.tables[t.PARKED].range(start, stop):
        spotted = (topic_id, *t.PARKED_KEY.unpack(key)[4:6])
        row = get(state, group, spotted)
        assert row is not None, "in the chain, so it is there"
        return spotted, row
    return None
