"""Actions of a transaction on consumer groups: acks and replays.

An action is stored with its transaction and takes effect with its decision. Storing it
reserves its messages: they do not expire, are not redelivered, and stay reserved over a
restart of the broker. A reservation names the token, so settling an action after a
reset or a deletion finds nothing and does nothing. Watermark actions concern no
consumer group: see `watermarks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers import acks, circuit_breaker, failures, key_fences, leases
from txmq.core.consumers.authorization import LeaseClaim, find_group, find_member
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.state import failed_changes, failed_messages, failed_rows
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.positions import Redelivery, Reservation
from txmq.core.state.state import State
from txmq.core.transactions import watermarks
from txmq.errors import BadRequest, NotLeased, UnknownLetter
from txmq.model.actions import AckAction, BundleAction, ReplayAction, WatermarkAction, read_action
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage

ActionRow = tuple[object, ...]


def check(state: State, actions: tuple[ActionRow, ...]) -> None:
    """Refuse what a transaction may not do.

    Its messages must be leased to the member, its dead letters open and not reserved,
    and its watermarks where the actions say.
    """
    for raw in actions:
        action = read_action(raw)
        if action is None:
            raise BadRequest(
                f"invalid action {raw!r:.200} of a transaction",
                hint="an action is an ack, a replay or a mark",
            )
        _check_one(state, action, actions)


def _check_one(state: State, action: BundleAction, actions: tuple[ActionRow, ...]) -> None:
    match action:
        case AckAction():
            return _check_ack(state, action)
        case ReplayAction():
            return _check_replay(state, action, actions)
    return watermarks.check(state, action)


def _check_ack(state: State, ack: AckAction) -> None:
    found = find_member(state, ack.group, ack.member)
    claim = _claim(state, found[0], ack)
    if not claim.stale and ack.start < ack.end:
        return
    topic, partition, start, end = (
        claim.stale[0] if claim.stale else (ack.topic, ack.partition, ack.start, ack.end)
    )
    message = (
        f"messages {start} to {end - 1} of {topic}/{partition} are not leased to {ack.member!r}"
    )
    raise NotLeased(message, hint="roll back: they were acked, have moved, or their lease ran out")


def _claim(state: State, group: ConsumerGroup, ack: AckAction) -> LeaseClaim:
    claim = LeaseClaim(group, ack.member, ack.generation)
    claim.add(state, ack.topic, ack.partition, ack.start, ack.end)
    return claim


def _check_replay(state: State, replay: ReplayAction, actions: tuple[ActionRow, ...]) -> None:
    group = find_group(state, replay.group)
    topic, partition, offset = replay.topic, replay.partition, replay.offset
    ref, row = failures.find_message(state, group, topic, partition, offset)
    why = failures.closed_reason(row) or (row is not None and failures.held_reason(state, row))
    if ref is not None and row is not None and not why:
        head = FailureChanges(state, group, 0).dead_head(ref, row.key_hash)
        if head is not None and not _replays(state, actions, replay.group, head):
            why = failures.behind(state, head)
    if why:
        raise UnknownLetter(f"{topic}/{partition}/{offset} of {replay.group!r}: {why}")


def _replays(state: State, actions: tuple[ActionRow, ...], group: str, ref: MessageRef) -> bool:
    """Return True if the transaction replays this letter, too."""
    topic_id, partition, offset = ref
    place = (group, state.topics_by_id[topic_id].name, partition, offset)
    replays = (read_action(raw) for raw in actions)
    return any(
        isinstance(one, ReplayAction) and (one.group, one.topic, one.partition, one.offset) == place
        for one in replays
    )


def reserve(state: State, token: bytes, actions: tuple[ActionRow, ...]) -> None:
    """Apply: the transaction is stored; reserve its messages for it."""
    for raw in actions:
        action = read_action(raw)
        assert action is not None, "checked"
        if isinstance(action, WatermarkAction):
            continue
        group = state.groups.by_name[action.group]
        if isinstance(action, AckAction):
            _reserve(state, group, _claim(state, group, action), token)
        else:
            ref, row = failures.find_message(
                state, group, action.topic, action.partition, action.offset
            )
            assert ref is not None, "checked"
            assert row is not None, "checked"
            _replace_row(state, group, ref, row._replace(token=token))


def _reserve(state: State, group: ConsumerGroup, claim: LeaseClaim, token: bytes) -> None:
    for topic_id, partition, start, end in claim.ranges:
        position = group.positions[TopicPartition(topic_id, partition)]
        for low, high, (number, attempt) in position.leased.overlap(start, end):
            lease = group.leases[number]
            position.reserved.put(
                low, high, Reservation(token, attempt, number, lease.member, lease.generation)
            )
        leases.release_range(state, group, TopicPartition(topic_id, partition), start, end)
    for ref in claim.rows:
        row = failed_messages.get(state, group, ref)
        assert row is not None, "leased, so it is there"
        _replace_row(state, group, ref, row._replace(token=token))


def _replace_row(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> None:
    """Apply: replace a row and release its lease."""
    failed_changes.drop(state, group, ref)
    leases.release_row(state, group, ref)
    failed_changes.put(state, group, ref, row)


def settle(
    state: State,
    token: bytes,
    actions: tuple[ActionRow, ...],
    context: RecordContext,
    *,
    committed: bool,
) -> None:
    """Apply: the transaction is decided.

    Its actions take effect, or its messages are delivered again.
    """
    for raw in actions:
        action = read_action(raw)
        assert action is not None, "checked"
        if isinstance(action, WatermarkAction):
            if committed:
                watermarks.advance(state, action, token)
            continue
        group = state.groups.by_name.get(action.group)
        topic = state.topics.get(action.topic)
        if (
            group is None
            or topic is None
            or (topic.topic_id, action.partition) not in group.positions
        ):
            continue
        tp = TopicPartition(topic.topic_id, action.partition)
        if isinstance(action, AckAction):
            _settle_ranges(state, group, tp, action, token, committed=committed)
            for ref, row in _reserved_rows(state, group, tp, action, token):
                _settle_row(state, group, ref, row, context, committed=committed)
        else:
            _settle_replay(state, group, (*tp, action.offset), token, context, committed=committed)


def _settle_ranges(
    state: State,
    group: ConsumerGroup,
    tp: TopicPartition,
    ack: AckAction,
    token: bytes,
    *,
    committed: bool,
) -> None:
    position = state.groups.position_for_update(group, tp)
    for start, end, reserved in position.reserved.overlap(ack.start, ack.end):
        if reserved.token != token:
            continue
        position.reserved.cut(start, end)
        if committed:
            position.settle(start, end)
            position.pass_over(start, end)
            circuit_breaker.record_acks(group, reserved.lease, end - start)
            group.processed[tp[0]] += end - start
        else:
            position.redeliver_range(start, end, Redelivery(reserved.attempt + 1))


def _reserved_rows(
    state: State, group: ConsumerGroup, tp: TopicPartition, ack: AckAction, token: bytes
) -> Iterator[tuple[MessageRef, FailedMessage]]:
    for ref, row in failed_messages.rows_between(state, group, tp, ack.start, ack.end):
        if row.token == token and row.kind == FailedKind.RETRY:
            yield ref, row


def _settle_row(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    row: FailedMessage,
    context: RecordContext,
    *,
    committed: bool,
) -> None:
    if committed:
        acks.settle_row(state, group, ref)
        state.groups.pass_over(group, ref)
    else:
        _replace_row(state, group, ref, row._replace(token=b"", due=context.stored_at))


def _settle_replay(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    token: bytes,
    context: RecordContext,
    *,
    committed: bool,
) -> None:
    row = failed_messages.get(state, group, ref)
    if row is None or failures.closed_reason(row, token) or row.token != token:
        return
    if not committed:
        _replace_row(state, group, ref, row._replace(token=b""))
        return
    made = FailureChanges(state, group, context.stored_at)
    made.retry(ref, failed_rows.replayed_row(row), context.stored_at)
    key_fences.apply_changes(state, group, *made.fields(), context.stored_at)
