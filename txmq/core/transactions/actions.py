"""What a transaction does to consumers, besides its messages: acks and replays that
take effect with its decision.

An action is ("ack", group, member, generation, topic, partition, start, end),
("replay", group, topic, partition, offset), or that of `core.transactions.marks`, which
concerns no consumer. Stored with the transaction, it reserves its messages: they do not
expire, are not redelivered and outlive the broker. A reserved message remembers the
token, so settling an action after a reset or a deletion finds nothing and does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import acks, changes, circuit_breaker, failed_messages, failures, leases
from txmq.core.consumers.authorization import Claim, active, known
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.failed_messages import Kind
from txmq.core.state.positions import Back, Reservation
from txmq.core.state.state import Rejected, State
from txmq.core.transactions import watermarks
from txmq.errors import BadRequest, NotLeased, UnknownLetter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spot, Spotted

Action = tuple[object, ...]


class AckAction(NamedTuple):
    """These messages are processed if the transaction commits."""

    group: str
    member: str
    generation: int
    topic: str
    partition: int
    start: int
    end: int


class ReplayAction(NamedTuple):
    """This letter is delivered again if the transaction commits."""

    group: str
    topic: str
    partition: int
    offset: int


def _parse(action: Action) -> AckAction | ReplayAction | watermarks.MarkAction | None:
    match action:
        case (
            "ack",
            str(group),
            str(member),
            int(generation),
            str(topic),
            int(partition),
            int(start),
            int(end),
        ):
            return AckAction(group, member, generation, topic, partition, start, end)
        case ("replay", str(group), str(topic), int(partition), int(offset)):
            return ReplayAction(group, topic, partition, offset)
    return watermarks.parse(action)


def check(state: State, actions: tuple[Action, ...]) -> Rejected | None:
    """May a transaction do this? Every message must be leased to the member, every
    letter open and free, every mark where the transaction says.
    """
    for raw in actions:
        action = _parse(raw)
        if action is None:
            return Rejected(BadRequest, "an action of a transaction is an ack, a replay or a mark")
        refused = _check_one(state, action)
        if refused is not None:
            return refused
    return None


def _check_one(
    state: State, action: AckAction | ReplayAction | watermarks.MarkAction
) -> Rejected | None:
    match action:
        case AckAction():
            return _check_ack(state, action)
        case ReplayAction():
            return _check_replay(state, action)
    return watermarks.check(state, action)


def _check_ack(state: State, ack: AckAction) -> Rejected | None:
    found = active(state, ack.group, ack.member)
    if isinstance(found, Rejected):
        return found
    claim = _claim(state, found[0], ack)
    if not claim.stale and ack.start < ack.end:
        return None
    topic, partition, start, end = claim.stale[0] if claim.stale else ack[3:]
    message = (
        f"messages {start} to {end - 1} of {topic}/{partition} are not leased to {ack.member!r}"
    )
    return Rejected(
        NotLeased, message, "they were acked, have moved, or their lease ran out: roll back"
    )


def _claim(state: State, group: Group, ack: AckAction) -> Claim:
    claim = Claim(group, ack.member, ack.generation)
    claim.add(state, ack.topic, ack.partition, ack.start, ack.end)
    return claim


def _check_replay(state: State, replay: ReplayAction) -> Rejected | None:
    group = known(state, replay.group)
    if isinstance(group, Rejected):
        return group
    topic, partition, offset = replay[1:]
    why = failures.not_open(failures.find(state, group, topic, partition, offset)[1])
    return (
        Rejected(UnknownLetter, f"{topic}/{partition}/{offset} of {replay.group!r}: {why}")
        if why
        else None
    )


def pin(state: State, token: bytes, actions: tuple[Action, ...]) -> None:
    """Apply: the transaction is stored, its messages are reserved for it."""
    for raw in actions:
        action = _parse(raw)
        assert action is not None, "checked"
        if isinstance(action, watermarks.MarkAction):
            continue
        group = state.consumers.groups[action.group]
        if isinstance(action, AckAction):
            _reserve(state, group, _claim(state, group, action), token)
        else:
            spotted, row = failures.find(state, group, *action[1:])
            assert spotted is not None, "checked"
            assert row is not None, "checked"
            _put_again(state, group, spotted, row._replace(token=token))


def _reserve(state: State, group: Group, claim: Claim, token: bytes) -> None:
    for topic_id, partition, start, end in claim.ranges:
        position = group.positions[topic_id, partition]
        for low, high, (number, attempt) in position.leased.overlap(start, end):
            lease = group.leases[number]
            position.reserved.put(
                low, high, Reservation(token, attempt, number, lease.member, lease.generation)
            )
        leases.release(state, group, (topic_id, partition), start, end)
    for spotted in claim.rows:
        row = failed_messages.get(state, group, spotted)
        assert row is not None, "leased, so it is there"
        _put_again(state, group, spotted, row._replace(token=token))


def _put_again(state: State, group: Group, spotted: Spotted, row: Moved) -> None:
    """Apply: a row in the place of its former self; nobody has it leased."""
    failed_messages.drop(state, group, spotted)
    leases.release_row(state, group, spotted)
    failed_messages.put(state, group, spotted, row)


def settle(
    state: State, token: bytes, actions: tuple[Action, ...], place: Place, *, committed: bool
) -> None:
    """Apply: the transaction is decided; its acks and replays take effect, or its
    messages are delivered again.
    """
    for raw in actions:
        action = _parse(raw)
        assert action is not None, "checked"
        if isinstance(action, watermarks.MarkAction):
            if committed:
                watermarks.move(state, action, token)
            continue
        group = state.consumers.groups.get(action.group)
        topic = state.topics.get(action.topic)
        if (
            group is None
            or topic is None
            or (topic.topic_id, action.partition) not in group.positions
        ):
            continue
        spot = (topic.topic_id, action.partition)
        if isinstance(action, AckAction):
            _settle_ranges(state, group, spot, action, token, committed=committed)
            for spotted, row in _reserved_rows(state, group, spot, action, token):
                _settle_row(state, group, spotted, row, place, committed=committed)
        else:
            _settle_replay(state, group, (*spot, action.offset), token, place, committed=committed)


def _settle_ranges(
    state: State, group: Group, spot: Spot, ack: AckAction, token: bytes, *, committed: bool
) -> None:
    position = state.consumers.touch(group, spot)
    for start, end, reserved in position.reserved.overlap(ack.start, ack.end):
        if reserved.token != token:
            continue
        position.reserved.cut(start, end)
        if committed:
            position.settle(start, end)
            circuit_breaker.note_acks(group, reserved.lease, end - start)
        else:
            position.give_back(start, end, Back(reserved.attempt + 1))


def _reserved_rows(
    state: State, group: Group, spot: Spot, ack: AckAction, token: bytes
) -> Iterator[tuple[Spotted, Moved]]:
    for spotted, row in failed_messages.between(state, group, spot, ack.start, ack.end):
        if row.token == token and row.kind == Kind.RETRY:
            yield spotted, row


def _settle_row(
    state: State, group: Group, spotted: Spotted, row: Moved, place: Place, *, committed: bool
) -> None:
    if committed:
        acks.settle_row(state, group, spotted)
    else:
        _put_again(state, group, spotted, row._replace(token=b"", due=place.stored_at))


def _settle_replay(
    state: State, group: Group, spotted: Spotted, token: bytes, place: Place, *, committed: bool
) -> None:
    row = failed_messages.get(state, group, spotted)
    if row is None or failures.not_open(row, token) or row.token != token:
        return
    if not committed:
        _put_again(state, group, spotted, row._replace(token=b""))
        return
    made = Changes(state, group, place.stored_at)
    made.retry(spotted, failures.replayed(row), place.stored_at)
    changes.apply(state, group, made.moves, made.fences, place.stored_at)
