"""What must be true of a group's state at any time: each message is in exactly one
place.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from txmq.core.consumers.failed_messages import Kind, Moved
from txmq.core.state.consumer_groups import FenceState
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from txmq.core.state.consumer_groups import Group, Spot, Spotted
    from txmq.core.state.state import State


def check(
    state: State, group: Group, keys: Mapping[Spotted, int | None], ended: AbstractSet[Spotted]
) -> None:
    """`ended`: messages that are known to be acked or abandoned."""
    rows = moved_rows(state, group)
    settled: set[Spotted] = set()
    for spot in group.positions:
        settled |= check_position(state, group, spot)
    abandoned = {m for m, row in rows.items() if row.kind == Kind.ABANDONED}
    assert rows.keys() <= settled, f"in two places: {rows.keys() - settled}"
    gone = settled - (rows.keys() - abandoned)
    assert gone == ended, f"{group.name}: lost {gone - ended}, back from the dead {ended - gone}"
    check_leases(state, group)
    check_indexes(state, group, rows)
    check_fences(state, group, rows, keys)


def moved_rows(state: State, group: Group) -> dict[Spotted, Moved]:
    start, stop = (
        t.MOVED_KEY.pack(number, 0, 0, 0) for number in (group.group_id, group.group_id + 1)
    )
    found: Any = state.tables[t.MOVED].range(start, stop)
    return {t.MOVED_KEY.unpack(key)[1:]: Moved(*row) for key, row in found}


def check_position(state: State, group: Group, spot: Spot) -> set[Spotted]:
    """Returns what is settled."""
    position = group.positions[spot]
    assert position.floor <= position.cursor <= state.topics_by_id[spot[0]].ends[spot[1]]
    maps = (position.settled, position.leased, position.redeliver, position.reserved)
    pieces = sorted((piece.start, piece.end) for ranges in maps for piece in ranges)
    at = position.floor
    for start, end in pieces:
        assert start == at, f"{spot}: [{at}, {start}) is nowhere or twice: {position}"
        at = end
    assert at == position.cursor, f"{spot}: [{at}, {position.cursor}) is nowhere: {position}"
    first = position.settled.first()
    assert first is None or first.start > position.floor, "the floor could be higher"
    above = {offset for start, end, _none in position.settled for offset in range(start, end)}
    return {(*spot, offset) for offset in (*range(position.floor), *above)}


def check_leases(state: State, group: Group) -> None:
    left: Counter[int] = Counter()
    for position in group.positions.values():
        for start, end, grant in position.leased:
            left[grant.lease] += end - start
    left.update(group.held_rows.values())
    assert left == {number: lease.left for number, lease in group.leases.items()}
    held = {row: number for number, lease in group.leases.items() for row in lease.rows}
    assert held == group.held_rows
    times = {(lease.deadline, group.group_id, number) for number, lease in group.leases.items()}
    assert times == {item for item in state.consumers.deadlines if item[1] == group.group_id}
    assert all(lease.member in group.members for lease in group.leases.values())


def check_indexes(state: State, group: Group, rows: dict[Spotted, Moved]) -> None:
    waiting = {
        (topic_id, partition, row.due, offset)
        for (topic_id, partition, offset), row in rows.items()
        if row.kind == Kind.RETRY
        and not row.token
        and (topic_id, partition, offset) not in group.held_rows
    }
    found = [t.RETRY_KEY.unpack(key) for key, _row in state.tables[t.RETRIES].range(b"")]
    assert waiting == {key[1:] for key in found if key[0] == group.group_id}
    wakes = [t.WAKE_KEY.unpack(key) for key, _row in state.tables[t.WAKES].range(b"")]
    assert waiting == {
        (key[2], key[3], key[0], key[4]) for key in wakes if key[1] == group.group_id
    }
    assert group.retrying == Counter(
        (topic_id, partition) for topic_id, partition, _due, _offset in waiting
    )
    letters: Any = [
        (t.LETTER_KEY.unpack(key), row) for key, row in state.tables[t.LETTERS].range(b"")
    ]
    dead = {
        message: row.number
        for message, row in rows.items()
        if row.kind in (Kind.LETTER, Kind.ABANDONED)
    }
    assert dead == {
        tuple(message): number
        for (of_group, number), message in letters
        if of_group == group.group_id
    }
    assert group.letters == sum(1 for row in rows.values() if row.kind == Kind.LETTER)


def check_fences(
    state: State, group: Group, rows: dict[Spotted, Moved], keys: Mapping[Spotted, int | None]
) -> None:
    parked = Counter(
        (message[0], row.key_hash) for message, row in rows.items() if row.kind == Kind.PARKED
    )
    fences = {(topic_id, key): fence for topic_id, key, fence in group.every_fence()}
    assert parked == Counter({name: fence.parked for name, fence in fences.items()})
    chained = [t.PARKED_KEY.unpack(key) for key, _row in state.tables[t.PARKED].range(b"")]
    assert sum(parked.values()) == sum(1 for key in chained if key[0] == group.group_id)
    assert group.waiting == {
        name for name, fence in fences.items() if fence.state is FenceState.WAITING
    }
    for (topic_id, _key), fence in fences.items():
        if fence.state is not FenceState.WAITING:
            head = rows.get((topic_id, fence.partition, fence.offset))
            kind = Kind.RETRY if fence.state is FenceState.RETRYING else Kind.LETTER
            assert head is not None, "a fence without its head"
            assert head.kind == kind
    for message, row in rows.items():
        assert row.key_hash == keys[message]
        if group.ordered and row.kind == Kind.RETRY and row.key_hash is not None:
            fence = fences[message[0], row.key_hash]
            assert (fence.partition, fence.offset) == message[1:], "two of one key are retried"
    for spot, position in group.positions.items():
        for start, end, grant in position.leased:
            for offset in range(start, end):
                name = (spot[0], keys[*spot, offset])
                assert name not in fences or grant.lease < fences[name].born, (
                    "a message of a fenced key went out"
                )
