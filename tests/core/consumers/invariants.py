"""Invariants of a group's state: each message is in exactly one place."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from txmq.core.state import attempts, failed_messages, failed_rows, letter_cells, letter_index
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.failed_messages import Standing
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.letter_cells import LetterState
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition


def check(
    state: State,
    group: ConsumerGroup,
    keys: Mapping[MessageRef, int | None],
    ended: AbstractSet[MessageRef],
    buried: AbstractSet[MessageRef] = frozenset(),
) -> None:
    """Check a group. `ended` are messages that were acked or abandoned, `buried` those
    of which an operator has made letters.
    """
    rows = moved_rows(state, group)
    settled: set[MessageRef] = set()
    for tp in group.positions:
        settled |= check_position(state, group, tp)
    abandoned = {m for m, row in rows.items() if row.kind == FailedKind.ABANDONED}
    assert rows.keys() <= settled, f"in two places: {rows.keys() - settled}"
    gone = settled - (rows.keys() - abandoned)
    assert gone == ended, f"{group.name}: lost {gone - ended}, back from the dead {ended - gone}"
    failed = Counter(message[:2] for message in rows.keys() - abandoned)
    assert group.failed == failed, f"{group.name}: counts {group.failed}, not {failed}"
    check_leases(state, group)
    check_indexes(state, group, rows)
    check_stores(state, group, rows)
    check_fences(state, group, rows, keys)
    check_histories(state, group, {m: row for m, row in rows.items() if m not in buried})
    check_letter_index(state, group, rows)


def check_letter_index(
    state: State, group: ConsumerGroup, rows: dict[MessageRef, FailedMessage]
) -> None:
    """Check that the index of letters is what the rows say."""
    made = t.MemoryTables()
    stored = stored_rows(state, group)
    for message, row in rows.items():
        letter = failed_rows.letter_of(message, stored[message])
        if letter is not None:
            letter_index.add(made, group.group_id, letter)
            if stored[message] != row:
                at = letter.died_at
                error = letter_cells.error_of(letter.error_type, letter.fingerprint)
                cell = (message[0], error, letter_cells.slot_at(at))
                cells: dict[letter_cells.CellKey, letter_cells.CellChange] = {}
                letter_cells.add_to_cell(cells, cell, at, letter.replays)
                abandoned = row.kind == FailedKind.ABANDONED
                to = LetterState.ABANDONED if abandoned else LetterState.REPLAYING
                letter_cells.move_cells(made, group.group_id, to, cells)
    for message, row in unswept_rows(state, group).items():
        letter = failed_rows.letter_of(message, row)
        assert letter is not None
        for key in letter_index.keys_of(group.group_id, letter):
            made[t.LETTER_INDEX].put(key, ())
    for name in (t.LETTER_INDEX, t.LETTER_CELLS):
        there, wanted = (
            {
                key: row[:2]  # first and last of a cell also tell of letters that left
                for key, row in tables[name].range(
                    group.group_id.to_bytes(4), (group.group_id + 1).to_bytes(4)
                )
            }
            for tables in (state.tables, made)
        )
        assert there == wanted, f"{name} differs from the rows"


def check_histories(
    state: State, group: ConsumerGroup, rows: dict[MessageRef, FailedMessage]
) -> None:
    """Check that a message has a history as long as it has a row, and has failed; that
    of a letter stays.
    """
    found: Any = state.tables[t.ATTEMPTS].range(b"")
    histories = {t.FAILED_KEY.unpack(key): row for key, row in found}
    known = {key[1:]: row for key, row in histories.items() if key[0] == group.group_id}
    for message in unswept_rows(state, group):
        known.pop(message, None)
    for message, row in rows.items():
        if row.dead_at:
            history = known.get(message, (0,))  # one that was dropped may not have failed
            assert history[0] >= row.replays, "each replay followed another death"
            assert history[0] or row.kind == FailedKind.ABANDONED
            assert len(history) <= 2 + attempts.KEPT_LAST


def stored_rows(state: State, group: ConsumerGroup) -> dict[MessageRef, FailedMessage]:
    rows = _raw_rows(state, group)
    return {ref: row for ref, row in rows.items() if not _is_processed(state, ref, row)}


def unswept_rows(state: State, group: ConsumerGroup) -> dict[MessageRef, FailedMessage]:
    """Return what is left of letters that were processed."""
    rows = _raw_rows(state, group)
    return {ref: row for ref, row in rows.items() if _is_processed(state, ref, row)}


def _is_processed(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    return failed_messages.standing(state, ref, row) is Standing.PROCESSED


def _raw_rows(state: State, group: ConsumerGroup) -> dict[MessageRef, FailedMessage]:
    start, stop = (
        t.FAILED_KEY.pack(number, 0, 0, 0) for number in (group.group_id, group.group_id + 1)
    )
    found: Any = state.tables[t.FAILED].range(start, stop)
    return {t.FAILED_KEY.unpack(key)[1:]: FailedMessage(*row) for key, row in found}


def moved_rows(state: State, group: ConsumerGroup) -> dict[MessageRef, FailedMessage]:
    """Return failed messages as what they are now: a letter that was put back is a
    retry.
    """
    found = {
        message: failed_messages.seen(state, group, message, row)
        for message, row in _raw_rows(state, group).items()
    }
    return {message: row for message, row in found.items() if row is not None}


def check_position(state: State, group: ConsumerGroup, tp: TopicPartition) -> set[MessageRef]:
    """Check a position and return the settled messages."""
    position = group.positions[tp]
    assert position.floor <= position.cursor <= state.topics_by_id[tp[0]].end_offsets[tp[1]]
    maps = (position.settled, position.leased, position.redeliver, position.reserved)
    pieces = sorted((piece.start, piece.end) for ranges in maps for piece in ranges)
    at = position.floor
    for start, end in pieces:
        assert start == at, f"{tp}: [{at}, {start}) is nowhere or twice: {position}"
        at = end
    assert at == position.cursor, f"{tp}: [{at}, {position.cursor}) is nowhere: {position}"
    first = position.settled.first()
    assert first is None or first.start > position.floor, "the floor could be higher"
    above = {offset for start, end, _none in position.settled for offset in range(start, end)}
    return {(*tp, offset) for offset in (*range(position.floor), *above)}


def check_leases(state: State, group: ConsumerGroup) -> None:
    left: Counter[int] = Counter()
    for position in group.positions.values():
        for start, end, grant in position.leased:
            left[grant.lease] += end - start
    left.update(group.leased_rows.values())
    assert left == {number: lease.remaining for number, lease in group.leases.items()}
    held = {row: number for number, lease in group.leases.items() for row in lease.rows}
    assert held == group.leased_rows
    times = {(lease.deadline, group.group_id, number) for number, lease in group.leases.items()}
    assert times == {item for item in state.groups.deadlines if item[1] == group.group_id}
    assert all(lease.member in group.members for lease in group.leases.values())


def check_indexes(
    state: State, group: ConsumerGroup, rows: dict[MessageRef, FailedMessage]
) -> None:
    passed = {m for m, row in stored_rows(state, group).items() if row != rows[m]}
    put_back = {m for m in passed if rows[m].kind != FailedKind.ABANDONED}
    queued = {(*tp, offset) for tp, queue in group.put_back.items() for offset in queue}
    assert queued == put_back - group.leased_rows.keys(), "the queue of a plan is another one"
    assert len(queued) == sum(map(len, group.put_back.values()))
    waiting = {
        (topic_id, partition, row.due, offset)
        for (topic_id, partition, offset), row in rows.items()
        if row.kind == FailedKind.RETRY
        and not row.token
        and (topic_id, partition, offset) not in group.leased_rows
        and (topic_id, partition, offset) not in put_back
    }
    found = [t.RETRY_KEY.unpack(key) for key, _row in state.tables[t.RETRIES].range(b"")]
    assert waiting == {key[1:] for key in found if key[0] == group.group_id}
    wakes = [
        t.RETRY_TIME_KEY.unpack(key) for key, _row in state.tables[t.RETRIES_BY_TIME].range(b"")
    ]
    assert waiting == {
        (key[2], key[3], key[0], key[4]) for key in wakes if key[1] == group.group_id
    }
    assert group.retrying == Counter(
        [(topic_id, partition) for topic_id, partition, _due, _offset in waiting]
        + [message[:2] for message in queued]
    )
    letters: Any = [
        (t.LETTER_KEY.unpack(key), row) for key, row in state.tables[t.LETTERS].range(b"")
    ]
    dead = {
        message: row.number
        for message, row in rows.items()
        if row.kind in (FailedKind.LETTER, FailedKind.ABANDONED) or message in put_back
    }
    over = {(row.number, message) for message, row in unswept_rows(state, group).items()}
    assert dead == {
        tuple(message): number
        for (of_group, number), message in letters
        if of_group == group.group_id and (number, tuple(message)) not in over
    }
    assert group.leased_letters.keys() <= group.leased_rows.keys()
    open_ones = [row for row in rows.values() if row.kind == FailedKind.LETTER]
    assert group.letters == len(open_ones)
    assert group.exported_letters == sum(row.exported > 0 for row in open_ones)


def check_stores(state: State, group: ConsumerGroup, rows: dict[MessageRef, FailedMessage]) -> None:
    local = {(row.store, ref): row for ref, row in rows.items() if row.kind == FailedKind.LOCAL}
    assert all(row.kind == FailedKind.LOCAL for row in rows.values() if row.store)
    found = [t.LOCAL_KEY.unpack(key) for key, _row in _local_rows(state, group, 0)]
    assert {(key[2], key[3:]) for key in found} == local.keys()
    ages = [t.LOCAL_TIME_KEY.unpack(key) for key, _row in _local_rows(state, group, 2)]
    assert {(key[2], key[4:], key[3]) for key in ages} == {
        (*place, row.first_failed_at) for place, row in local.items()
    }
    orders = Counter(t.LOCAL_KEY.unpack(key)[2] for key, _row in _local_rows(state, group, 1))
    assert orders == Counter({one: store.orders for one, store in group.stores.items()})
    messages, attempts = Counter[bytes](), Counter[bytes]()
    for (store_id, ref), row in local.items():
        assert (row.first_failed_at, *ref) >= group.stores[store_id].begin
        messages[store_id] += 1
        attempts[store_id] += row.attempt
    assert messages == Counter({one: store.messages for one, store in group.stores.items()})
    assert attempts == Counter({one: store.attempts for one, store in group.stores.items()})
    for store in group.stores.values():
        assert store.messages or store.orders or store.fence, "of which nothing is left to know"
        assert bool(store.lost_at) is not group.has_owner(store)
        assert store.fence or not store.adopted
    adopting = any(store.adopted for store in group.stores.values())
    assert adopting is (group.group_id in state.groups.adopting)


def _local_rows(state: State, group: ConsumerGroup, kind: int) -> Any:
    low, high = (t.GROUP_KEY.pack(group.group_id) + bytes([number]) for number in (kind, kind + 1))
    return state.tables[t.LOCAL].range(low, high)


def check_fences(
    state: State,
    group: ConsumerGroup,
    rows: dict[MessageRef, FailedMessage],
    keys: Mapping[MessageRef, int | None],
) -> None:
    parked = Counter(
        (message[0], row.key_hash) for message, row in rows.items() if row.kind == FailedKind.PARKED
    )
    fences = {(topic_id, key): fence for topic_id, key, fence in group.all_fences()}
    assert parked == Counter({name: fence.parked for name, fence in fences.items()})
    chained = [t.PARKED_KEY.unpack(key) for key, _row in state.tables[t.PARKED].range(b"")]
    assert sum(parked.values()) == sum(1 for key in chained if key[0] == group.group_id)
    waiting = [name for name, fence in fences.items() if fence.state is FenceState.WAITING]
    assert {*group.waiting_fences} == {*waiting}
    assert sorted(
        (tp[0], key_hash, tp[1], first_lease)
        for tp, queue in group.waiting_fences.partitions.items()
        for first_lease, key_hash in queue
    ) == sorted((*name, fences[name].partition, fences[name].first_lease) for name in waiting)
    for (topic_id, _key), fence in fences.items():
        if fence.state is not FenceState.WAITING:
            head = rows.get((topic_id, fence.partition, fence.offset))
            retried = fence.state is FenceState.RETRYING
            kinds = (FailedKind.RETRY, FailedKind.LOCAL) if retried else (FailedKind.LETTER,)
            assert head is not None, "a fence without its head"
            assert head.kind in kinds
    for message, row in rows.items():
        assert row.key_hash == keys[message]
        judged = bool(row.first_failed_at or row.number or row.replays or row.given_by)
        assert row.accepted or not judged, "a filter could pass over what was accepted"
        retried = row.kind in (FailedKind.RETRY, FailedKind.LOCAL)
        if group.ordered and retried and row.key_hash is not None:
            known = fences.get((message[0], row.key_hash))
            assert known is not None, "a key without a fence is retried"
            assert (known.partition, known.offset) == message[1:], "two of one key are retried"
    for tp, position in group.positions.items():
        for start, end, grant in position.leased:
            for offset in range(start, end):
                name = (tp[0], keys[*tp, offset])
                assert name not in fences or grant.lease < fences[name].first_lease, (
                    "a message of a fenced key went out"
                )
