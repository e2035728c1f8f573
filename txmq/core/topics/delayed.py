"""Delayed messages: stored, and in no topic before their time.

Each is a batch of its own, so that it can be published, recalled and found by itself.
Its row stands under its time (table `delayed`), its id leads to the row
(`delayed_ids`), and its place in the log is not to be thrown away (`delayed_at`). A
recall leaves the id behind for a while, so that it can be repeated (`recalled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

TAKEN_BACK = 0  # instead of a time in table `delayed_ids`: recalled
Id = tuple[bytes, int]  # producer id or token, sequence


class Delayed(NamedTuple):
    """A row of table `delayed`, whose key has its time and where it was stored first.
    Its id is origin and sequence.

    `moved_to` is where it stands in the log since its segment had to go; 0 = where it
    was stored first.
    """

    topic_id: int
    partition: int
    length: int
    tag_filter: int
    key_hash: int | None
    origin: bytes
    sequence: int
    moved_to: int = 0


class Waiting(NamedTuple):
    """A delayed message and its place in the table; `position` is where it was stored
    first.
    """

    due: int
    position: int
    message: Delayed

    @property
    def place(self) -> int:
        """Where it stands in the log."""
        return self.message.moved_to or self.position


def put(state: State, due: int, position: int, message: Delayed) -> None:
    """Apply: the message waits for that time."""
    state.tables[t.DELAYED].put(t.DELAYED_KEY.pack(due, position), message)
    state.tables[t.DELAYED_IDS].put(
        t.MESSAGE_KEY.pack(message.origin, message.sequence), (due, position)
    )
    state.tables[t.DELAYED_AT].put(t.PIN_KEY.pack(position), (due, position))
    state.delayed += 1


def take(state: State, due: int, position: int) -> Delayed:
    """Apply: the message waits no more, and goes elsewhere."""
    message = _get(state, due, position)
    state.tables[t.DELAYED].delete(t.DELAYED_KEY.pack(due, position))
    state.tables[t.DELAYED_IDS].delete(t.MESSAGE_KEY.pack(message.origin, message.sequence))
    state.tables[t.DELAYED_AT].delete(t.PIN_KEY.pack(message.moved_to or position))
    state.delayed -= 1
    return message


def move(state: State, due: int, position: int, to: int) -> None:
    """Apply: the message stands elsewhere in the log now; its turn stays the same."""
    message = _get(state, due, position)
    state.tables[t.DELAYED_AT].delete(t.PIN_KEY.pack(message.moved_to or position))
    state.tables[t.DELAYED_AT].put(t.PIN_KEY.pack(to), (due, position))
    state.tables[t.DELAYED].put(t.DELAYED_KEY.pack(due, position), message._replace(moved_to=to))


def below(state: State, place: int) -> Iterator[Waiting]:
    """Messages that stand below that place in the log, the lowest first."""
    for _key, (due, position) in state.tables[t.DELAYED_AT].range(b"", t.PIN_KEY.pack(place)):
        yield Waiting(due, position, _get(state, due, position))


def recall(state: State, found: Id, at: int) -> None:
    """Apply: the message is taken back; that is remembered."""
    waiting = find(state, found)
    assert waiting is not None, "recalled, so it waited"
    take(state, waiting.due, waiting.position)
    state.tables[t.DELAYED_IDS].put(t.MESSAGE_KEY.pack(*found), (TAKEN_BACK, at))
    state.tables[t.RECALLED].put(t.RECALLED_KEY.pack(at, *found), ())


def forget(state: State, at: int, found: Id) -> None:
    """Apply: a recall is no longer remembered."""
    state.tables[t.RECALLED].delete(t.RECALLED_KEY.pack(at, *found))
    state.tables[t.DELAYED_IDS].delete(t.MESSAGE_KEY.pack(*found))


def find(state: State, found: Id) -> Waiting | None:
    """The message of that id, while it waits."""
    row = state.tables[t.DELAYED_IDS].get(t.MESSAGE_KEY.pack(*found))
    if row is None or row[0] == TAKEN_BACK:
        return None
    return Waiting(row[0], row[1], _get(state, row[0], row[1]))


def still(state: State, waiting: Waiting) -> bool:
    """Whether it waits, where it stood."""
    row = state.tables[t.DELAYED].get(t.DELAYED_KEY.pack(waiting.due, waiting.position))
    return row is not None and Delayed(*row) == waiting.message


def was_recalled(state: State, found: Id) -> bool:
    """Whether the message was taken back, as far as that is remembered."""
    row = state.tables[t.DELAYED_IDS].get(t.MESSAGE_KEY.pack(*found))
    return row is not None and row[0] == TAKEN_BACK


def rows(
    state: State, start: int = 0, stop: int | None = None, position: int = 0
) -> Iterator[Waiting]:
    """What waits for the times from `start`, and of that from `position`, on; `stop`
    excluded. The earliest first.
    """
    end = None if stop is None else t.DELAYED_KEY.pack(stop, 0)
    for key, row in state.tables[t.DELAYED].range(t.DELAYED_KEY.pack(start, position), end):
        due, at = t.DELAYED_KEY.unpack(key)
        yield Waiting(due, at, Delayed(*row))


def lowest_place(state: State) -> int | None:
    """The lowest position in the log at which a delayed message stands."""
    return next(
        (t.PIN_KEY.unpack(key)[0] for key, _row in state.tables[t.DELAYED_AT].range(b"")), None
    )


def recalls_before(state: State, at: int) -> Iterator[tuple[int, bytes, int]]:
    """(recalled at, origin, sequence) of recalls from before that time, the oldest
    first.
    """
    for key, _row in state.tables[t.RECALLED].range(b"", t.RECALLED_KEY.pack(at, bytes(16), 0)):
        yield t.RECALLED_KEY.unpack(key)


def _get(state: State, due: int, position: int) -> Delayed:
    row = state.tables[t.DELAYED].get(t.DELAYED_KEY.pack(due, position))
    assert row is not None, "its id is known, so it is there"
    return Delayed(*row)
