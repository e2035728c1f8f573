"""What can be asked about consumer groups and dead letters: pure reads, answers of
plain JSON values.
"""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failed_messages, stall_reasons
from txmq.core.consumers import failures as rules
from txmq.core.consumers.authorization import active, known
from txmq.core.consumers.failed_messages import Kind, Moved
from txmq.core.consumers.stall_reasons import Seen
from txmq.core.state import visibility
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.state import Rejected, State
from txmq.errors import UnknownLetter, UnknownMember
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.consumer_groups import Fence, Group, Member, Spot, Spotted
    from txmq.core.state.positions import Position

FENCES_SHOWN = 100
TIMED = 16  # partitions of a group whose oldest message is looked up for a list of all groups
LETTERS_COUNTED = 100_000  # by `letter_stats`, newest last: what is beyond is only said to be there


class Letter(NamedTuple):
    """A dead or abandoned letter: where its batch is, and everything else about it."""

    position: int
    length: int
    row: int
    fields: dict[str, Any]


def groups(state: State, now: int | None = None) -> list[dict[str, Any]]:
    """All groups, by name. `now` None = as of the last record.

    `lag_ms` is the age of the oldest message that is neither processed nor moved, in
    the partitions with most of them.
    """
    at = state.stored_at if now is None else now
    return [_summary(state, group, at) for _name, group in sorted(state.consumers.groups.items())]


def counts(state: State, group: Group, now: int) -> dict[str, Any]:
    """What of a group can be counted."""
    names = ("group", "members", "lag", "lag_ms", "leased", "retrying", "parked", "letters")
    summary = _summary(state, group, now)
    return {name: summary[name] for name in names}


def _summary(state: State, group: Group, now: int) -> dict[str, Any]:
    lags = {spot: _lag(state, spot, position) for spot, position in group.positions.items()}
    topics = sorted({state.topics_by_id[spot[0]].name for spot in group.positions})
    return {
        "group": group.name,
        "mode": group.settings.mode,
        "state": _state(group),
        "generation": group.generation,
        "epoch": group.epoch,
        "members": len(group.members),
        "topics": topics,
        "lag": sum(lags.values()),
        "lag_ms": max(
            (_age_ms(state, group, spot, now) for spot in nlargest(TIMED, lags, lags.__getitem__)),
            default=0,
        ),
        "leased": sum(lease.left for lease in group.leases.values()),
        "retrying": sum(group.retrying.values()),
        "parked": sum(fence.parked for _topic, _key, fence in group.every_fence()),
        "fences": sum(map(len, group.fences.values())),
        "letters": group.letters,
        "floods": group.floods,
        "expired": group.expired,
    }


def _age_ms(state: State, group: Group, spot: Spot, now: int) -> int:
    oldest = stall_reasons.oldest_waiting(state, group, spot)
    return 0 if oldest is None else max(0, now - oldest) // 1_000


def _state(group: Group) -> str:
    if group.paused:
        return "paused"
    if group.flood is not None:
        return "guarded"
    if group.resets:
        return "being reset"
    if group.cloning is not None:
        return "being cloned"
    return "active" if group.members else "empty"


def _lag(state: State, spot: Spot, position: Position) -> int:
    """Messages of the partition that are neither processed nor moved."""
    topic = state.topics_by_id[spot[0]]
    return (
        0 if topic.deleted else visibility.end(state, *spot) - position.cursor + position.unsettled
    )


def show(state: State, name: str, seen: Seen) -> dict[str, Any] | Rejected:
    """A group in full. `why` tells for each partition what keeps it from moving, ""
    where nothing does (`standstill`).

    `lag_ms` is the age of the oldest message that is neither processed nor moved.
    """
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    positions = [_position(state, group, spot, seen) for spot in sorted(group.positions)]
    return _summary(state, group, seen.now) | {
        "settings": settings(group),
        "flood": None if group.flood is None else group.flood._asdict(),
        "member_list": [_member(state, group, member, seen) for member in group.members.values()],
        "lag_ms": max((position["lag_ms"] for position in positions), default=0),
        "paused_topics": [
            state.topics_by_id[topic_id].name for topic_id in sorted(group.paused_topics)
        ],
        "positions": positions,
        "fence_list": [_fence(state, *item) for item in islice(group.every_fence(), FENCES_SHOWN)],
    }


def settings(group: Group) -> dict[str, Any]:
    """A group's settings; times are microseconds."""
    return group.settings._asdict() | {"retry": group.settings.policy.to_json()}


def _member(state: State, group: Group, member: Member, seen: Seen) -> dict[str, Any]:
    mine = [lease for lease in group.leases.values() if lease.member == member.name]
    return {
        "member": member.name,
        "since": member.since,
        "assignment": _assignment(state, member),
        "leased": sum(lease.left for lease in mine),
        "oldest_lease": min((lease.granted_at for lease in mine), default=None),
        "paused": sorted(seen.paused.get(member.name, ())),
    }


def _assignment(state: State, member: Member) -> list[tuple[str, int]]:
    return [
        (state.topics_by_id[topic_id].name, partition) for topic_id, partition in member.partitions
    ]


def _position(state: State, group: Group, spot: Spot, seen: Seen) -> dict[str, Any]:
    position = group.positions[spot]
    reason = stall_reasons.why(state, group, spot, seen)
    topic = state.topics_by_id[spot[0]]
    holders = sorted({group.leases[piece.value.lease].member for piece in position.leased})
    owners = [member.name for member in group.members.values() if spot in member.partitions]
    return {
        "topic": topic.name,
        "partition": spot[1],
        "floor": position.floor,
        "cursor": position.cursor,
        "end": visibility.end(state, *spot, seen.durable),
        "lag": _lag(state, spot, position),
        "leased": position.leased.total,
        "leased_to": holders,
        "redeliver": position.redeliver.total,
        "reserved": position.reserved.total,
        "retrying": group.retrying[spot],
        "owners": owners,
        "passed": _passed(state, group, spot),
        "lag_ms": _age_ms(state, group, spot, seen.now),
        "why": "" if reason is None else reason.text,
        "reason": "" if reason is None else reason.code,
    }


def _passed(state: State, group: Group, spot: Spot) -> int:
    row = state.tables[t.PASSED].get(t.POSITION_KEY.pack(group.group_id, *spot))
    return 0 if row is None else int(row[0])


def _fence(state: State, topic_id: int, key_hash: int, fence: Fence) -> dict[str, Any]:
    return {
        "topic": state.topics_by_id[topic_id].name,
        "key_hash": key_hash,
        "state": FenceState(fence.state).name.lower(),
        "partition": fence.partition,
        "offset": fence.offset,
        "parked": fence.parked,
        "since": fence.since,
    }


def membership(
    state: State, name: str, member: str, instance: str = ""
) -> dict[str, Any] | Rejected:
    """What a heartbeat tells a member: the present generation, and its share of it.

    An `instance` that another process of the same name has replaced is no member any
    more.
    """
    found = active(state, name, member)
    if isinstance(found, Rejected):
        return found
    group, present = found
    if instance and instance != present.instance:
        replaced = f"another process has joined {name!r} as {member!r}"
        return Rejected(
            UnknownMember, replaced, "give each process a name of its own", {"replaced": True}
        )
    told = {
        "generation": group.generation,
        "epoch": group.epoch,
        "assignment": _assignment(state, present),
    }
    return told | {"consume_timeout_ms": group.settings.consume_timeout_us // 1_000}


def letters(
    state: State, name: str, after: int, limit: int
) -> tuple[list[Letter], int | None] | Rejected:
    """A page of letters, also abandoned ones, in the order of dying; and the next
    page's `after`, None = no more.
    """
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    page = list(islice(_letters(state, group, after), limit))
    following = page[-1][1].number if len(page) == limit else None
    return [_letter(state, group, *item) for item in page], following


def _letters(state: State, group: Group, after: int = 0) -> Iterator[tuple[Spotted, Moved]]:
    start, stop = (
        t.LETTER_KEY.pack(group.group_id, after + 1),
        t.LETTER_KEY.pack(group.group_id, t.SIGN),
    )
    rows: Any = state.tables[t.LETTERS].range(start, stop)
    for _key, spotted in rows:
        row = failed_messages.get(state, group, tuple(spotted))
        assert row is not None, "in the index, so it is there"
        yield tuple(spotted), row


def letter(state: State, name: str, topic: str, partition: int, offset: int) -> Letter | Rejected:
    """One letter, by where its message was."""
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    spotted, row = rules.find(state, group, topic, partition, offset)
    if spotted is None or row is None or row.kind not in (Kind.LETTER, Kind.ABANDONED):
        message = f"consumer group {name!r} has no dead letter {topic}/{partition}/{offset}"
        return Rejected(UnknownLetter, message, "see: txmq dlq list")
    return _letter(state, group, spotted, row)


def _letter(state: State, group: Group, spotted: Spotted, row: Moved) -> Letter:
    topic_id, partition, offset = spotted
    fence = group.fence(topic_id, row.key_hash)
    fields = {
        "group": group.name,
        "topic": state.topics_by_id[topic_id].name,
        "partition": partition,
        "offset": offset,
        "number": row.number,
        "state": "dead" if row.kind == Kind.LETTER else "abandoned",
        "attempts": row.attempt,
        "replays": row.replays,
        "deaths": row.deaths,
        "error_type": row.error_type,
        "error_text": row.error_text,
        "fingerprint": row.fingerprint,
        "consumer": row.consumer,
        "first_failed_at": row.first_failed_at,
        "dead_at": row.dead_at,
        "stored_at": row.stored_at,
        "key_hash": row.key_hash,
        "parked_behind": 0 if fence is None or fence.offset != offset else fence.parked,
        "reserved_by": row.token.hex() or None,
        "reason": row.reason,
    }
    return Letter(row.position, row.length, row.row, fields)


def letter_stats(state: State, name: str) -> dict[str, Any] | Rejected:
    """Open letters by fingerprint, error type, topic and key; how old they are."""
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    rows = [
        item
        for item in islice(_letters(state, group), LETTERS_COUNTED)
        if item[1].kind == Kind.LETTER
    ]
    topics = Counter(state.topics_by_id[spotted[0]].name for spotted, _row in rows)
    died = [row.dead_at for _spotted, row in rows]
    keys = Counter(row.key_hash for _spotted, row in rows if row.key_hash is not None)
    return {
        "group": group.name,
        "letters": group.letters,
        "counted": len(rows),
        "by_fingerprint": dict(Counter(row.fingerprint for _spotted, row in rows).most_common()),
        "by_error_type": dict(Counter(row.error_type for _spotted, row in rows).most_common()),
        "by_topic": dict(topics.most_common()),
        "keys": len(keys),
        "most_of_one_key": max(keys.values(), default=0),
        "replayed": sum(1 for _spotted, row in rows if row.replays),
        "oldest": min(died, default=None),
        "newest": max(died, default=None),
    }
