"""Failures: negative acks, retries, dead letters, their replay and abandonment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from txmq.core.consumers import circuit_breaker, key_fences, leases
from txmq.core.consumers.authorization import LeaseClaim, find_group, find_member
from txmq.core.consumers.commands import (
    AbandonLetters,
    KeySource,
    NackMessage,
    ReplayLetters,
    TopicOffset,
)
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import Abandoned, DeadLettered, GroupGuarded, Replayed, Retried
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import attempts, failed_changes, failed_messages, failed_rows, plan_letters
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.topics import topics
from txmq.errors import BadRequest, NotLeased, UnknownLetter
from txmq.model.retry import FailureAction, FailureReport
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import DAY

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

# Enough of an error's text for a stack trace, too little to fill a disk.
MAX_TEXT_BYTES = 4 << 10
MAX_NAME_BYTES = 256  # of an error's type and of its fingerprint
MAX_DELAY = 30 * DAY
MAX_LETTERS = 1_000  # of one command, so that each apply is short
KIND_NAMES = {FailedKind.RETRY: "retry", FailedKind.PARKED: "parked", FailedKind.LETTER: "letter"}


class NackReply(NamedTuple):
    """The result of a negative ack.

    `moved` is "retry", "letter", or "parked" if another message of its key is retried
    or dead. The consumer has to return, unprocessed, all messages of this key under
    leases below `fence_lease`; 0 = the key has no fence. In an ordered group the same
    holds if the nack is refused with NotLeased: the error's detail has the number.
    `guarded`: the group's circuit breaker is open, so the consumer had better return
    what it has not started.
    """

    moved: str
    attempt: int
    due_at: int
    fence_lease: int
    guarded: bool = False


# Why a letter is left alone by what was read before.
CHANGED_SINCE = "it has died again or was edited meanwhile"


class LettersReply(NamedTuple):
    """The dead letters that were changed, and those refused with the reason."""

    done: tuple[TopicOffset, ...]
    refused: tuple[tuple[str, int, int, str], ...]


def key_source(state: State, command: NackMessage) -> KeySource | None:
    """Return the place of the key of a message that fails for the first time.

    None if no key has to be read: the row of an earlier failure has it, or the nack
    will be refused.
    """
    group = state.groups.by_name.get(command.group)
    topic = state.topics.get(command.topic)
    if group is None or topic is None:
        return None
    tp = TopicPartition(topic.topic_id, command.partition)
    offset, position = command.offset, group.positions.get(tp)
    if position is None or not position.leased.overlap(offset, offset + 1):
        return None
    for base, entry in topics.entry_at(state, *tp, offset):
        return KeySource(entry, offset - base)
    return None


def decide_nack(state: State, command: NackMessage, now: int) -> Outcome:
    group, _member = find_member(state, command.group, command.member)
    if command.delay is not None and not 0 <= command.delay <= MAX_DELAY:
        raise BadRequest(
            f"a delay of {command.delay} µs is out of range",
            hint=f"choose a delay of 0 to {MAX_DELAY} µs",
        )
    claim = LeaseClaim(group, command.member, command.generation)
    claim.add(state, command.topic, command.partition, command.offset, command.offset + 1)
    if claim.stale:
        place = f"{command.topic}/{command.partition}"
        message = f"message {command.offset} of {place} is not leased to {command.member!r}"
        hint = "it was acked, has failed, or its lease has expired: drop it"
        raise NotLeased(message, hint=hint, detail={"fence_lease": group.next_lease})
    ref = (state.topics[command.topic].topic_id, command.partition, command.offset)
    if claim.rows:
        row = failed_messages.get(state, group, ref)
        assert row is not None, "leased, so it is there"
    else:
        row = _first_row(state, group, ref, command)
    return _fail(state, group, ref, _with_error(row, command, now), command, now)


def _first_row(
    state: State, group: ConsumerGroup, ref: MessageRef, command: NackMessage
) -> FailedMessage:
    """Return the row of a message that is leased in its partition."""
    source = command.source or key_source(state, command)
    assert source is not None, "leased, so it is in a published batch"
    held = group.positions[TopicPartition(ref[0], ref[1])].leased.overlap(ref[2], ref[2] + 1)
    grant = held[0].value
    deaths = group.leases[grant.lease].deaths
    return failed_rows.new_row(
        source.entry, source.row, command.key_hash, attempt=grant.attempt, deaths=deaths
    )


def _with_error(row: FailedMessage, command: NackMessage, now: int) -> FailedMessage:
    failure = command.failure
    if command.postpone and failure == FailureReport():
        return row._replace(consumer=command.member, accepted=True)
    return row._replace(
        consumer=command.member,
        accepted=True,
        first_failed_at=row.first_failed_at or now,
        **cut_failure(failure),
    )


def cut_failure(failure: FailureReport) -> dict[str, Any]:
    """Return the fields of a row that tell of a failure, cut to their maximum."""
    return {
        "error_type": _cut(failure.type, MAX_NAME_BYTES),
        "error_text": _cut(failure.text, MAX_TEXT_BYTES),
        "fingerprint": _cut(failure.fingerprint, MAX_NAME_BYTES),
    }


def cut_reason(reason: str) -> str:
    """Return an operator's reason, cut to its maximum."""
    return _cut(reason, MAX_TEXT_BYTES)


def _cut(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _fail(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    row: FailedMessage,
    command: NackMessage,
    now: int,
) -> Outcome:
    changes = FailureChanges(state, group, now)
    action, counts = _action(group, command), not (command.dead or command.postpone)
    opens = counts and circuit_breaker.trips(group, ref, row, now)
    if action is FailureAction.POSTPONE:
        pause = _pause(group, command)
        changes.retry(ref, row._replace(attempt=row.attempt - 1), now + pause)
    else:
        delay = group.settings.redelivery_delay(row.attempt, command.chance)
        if action is FailureAction.DEAD or delay is None or row.trial_by:
            changes.dead_letter(ref, row)
        else:
            changes.retry(ref, row, now + (delay if command.delay is None else command.delay))
    moves, fences = changes.fields()
    after = moves[0].row
    event: DeadLettered | Retried
    if after.kind == FailedKind.LETTER:
        event = DeadLettered(group.group_id, moves, fences)
    else:
        event = Retried(group.group_id, moves, fences, not command.postpone)
    raised = (change.first_lease for change in fences if change.state != key_fences.LIFTED)
    fence_lease = next(raised, 0)
    if not fence_lease and after.kind == FailedKind.PARKED:
        fence = group.fence(ref[0], row.key_hash)
        fence_lease = 0 if fence is None else fence.first_lease
    guarded = opens or group.breaker is not None
    kind = KIND_NAMES[FailedKind(after.kind)]
    reply = NackReply(kind, after.attempt, after.due, fence_lease, guarded)
    opened = (GroupGuarded(group.group_id, row.fingerprint, row.error_type),) if opens else ()
    return Outcome((event, *opened), reply)


def _action(group: ConsumerGroup, command: NackMessage) -> FailureAction:
    """Return the consumer's wish, or the action that the retry policy has for the
    error.
    """
    if command.dead:
        return FailureAction.DEAD
    if command.postpone or group.breaker is not None:
        return FailureAction.POSTPONE
    return group.settings.policy.action((command.failure.type, *command.failure.bases))


def _pause(group: ConsumerGroup, command: NackMessage) -> int:
    """Return the delay of a postponed message.

    It is 0 while the circuit breaker is open, because the probe limits deliveries.
    """
    if command.delay is not None:
        return command.delay
    return 0 if group.breaker is not None else group.settings.policy.delays_us[0]


def decide_replay(state: State, command: ReplayLetters, now: int) -> Outcome:
    def replay(
        changes: FailureChanges, ref: MessageRef, row: FailedMessage, named: NamedLetters
    ) -> str:
        return put_back(state, changes, ref, row.key_hash, named, now)

    return _change_letters(state, command, now, replay, Replayed, held_reason)


def put_back(
    state: State,
    changes: FailureChanges,
    ref: MessageRef,
    key_hash: int | None,
    others: OpenLetters,
    now: int,
) -> str:
    """Put an open letter back; return why it is not, "" = it is.

    A dead letter of its key may hold it up: one that died while the group skipped dead
    letters may be behind one that died later, and holds its key. If that one is among
    the `others`, which are to be put back as well, it follows now. Otherwise the letter
    would wait for ever.
    """
    head = changes.dead_head(ref, key_hash)
    if head is None:
        others.put_back(changes, ref, now)
    elif others.has(head):
        changes.lead(ref, others.replay(ref), now)
        changes.park(head, others.replay(head))
    else:
        return behind(state, head)
    return ""


def behind(state: State, head: MessageRef) -> str:
    """Return the reason of what waits for a dead letter of its key."""
    place = f"{state.topics_by_id[head[0]].name}/{head[1]}/{head[2]}"
    return f"behind dead letter {place} of its key"


class OpenLetters(Protocol):
    """Letters that are to be put back, each once."""

    def has(self, ref: MessageRef) -> bool: ...

    def replay(self, ref: MessageRef) -> FailedMessage: ...

    def put_back(self, changes: FailureChanges, ref: MessageRef, now: int) -> None: ...


class NamedLetters:
    """The letters that a command names."""

    def __init__(self, rows: dict[MessageRef, FailedMessage]) -> None:
        self._rows = rows

    def has(self, ref: MessageRef) -> bool:
        """Return True if a letter is still to be changed."""
        return ref in self._rows

    def replay(self, ref: MessageRef) -> FailedMessage:
        """Return the row of a letter, which is put back now."""
        return failed_rows.replayed_row(self._rows.pop(ref))

    def put_back(self, changes: FailureChanges, ref: MessageRef, now: int) -> None:
        """Add a letter to the changes that need no other one."""
        changes.retry(ref, self.replay(ref), now)


def decide_abandon(state: State, command: AbandonLetters, now: int) -> Outcome:
    if not command.reason:
        raise BadRequest(
            "dead letters cannot be abandoned without a reason",
            hint="name a reason: it is stored with each letter",
        )
    reason = cut_reason(command.reason)

    def abandon(
        changes: FailureChanges, ref: MessageRef, row: FailedMessage, _named: NamedLetters
    ) -> str:
        changes.abandon(ref, row, reason)
        return ""

    return _change_letters(state, command, now, abandon, Abandoned, _never)


def _change_letters(
    state: State,
    command: ReplayLetters | AbandonLetters,
    now: int,
    change: Callable[[FailureChanges, MessageRef, FailedMessage, NamedLetters], str],
    kind: type[Replayed | Abandoned],
    refuses: Callable[[State, FailedMessage], str],
) -> Outcome:
    """Change each dead letter in the order of publication, unless `refuses` has a
    reason.

    So letters of one key become a chain in their order.
    """
    group, letters = find_group(state, command.group), command.letters
    if len(letters) > MAX_LETTERS:
        message = f"{len(letters)} letters in one call are too many"
        raise BadRequest(message, hint=f"send at most {MAX_LETTERS} in each call")
    changes = FailureChanges(state, group, now)
    found: list[tuple[MessageRef, FailedMessage, TopicOffset]] = []
    refused: list[tuple[str, int, int, str]] = []
    for letter in dict.fromkeys(letters):
        ref, row = find_message(state, group, *letter)
        if ref is None or row is None:
            refused.append((*letter, closed_reason(None)))
        elif reason := closed_reason(row) or refuses(state, row):
            refused.append((*letter, reason))
        else:
            found.append((ref, row, letter))
    found.sort(key=lambda item: (item[1].visible_at, item[0]))
    named = NamedLetters({ref: row for ref, row, _letter in found})
    done: list[TopicOffset] = []
    for ref, row, letter in found:
        if named.has(ref) and (reason := change(changes, ref, row, named)):
            refused.append((*letter, reason))
        else:
            done.append(letter)
    event = kind(group.group_id, *changes.fields(), command.by)
    return Outcome((event,) if changes else (), LettersReply(tuple(done), tuple(refused)))


def find_message(
    state: State, group: ConsumerGroup, topic: str, partition: int, offset: int
) -> tuple[MessageRef, FailedMessage | None] | tuple[None, None]:
    """Return the reference of a message, and its row if it has failed.

    Both are None if the group does not read the partition.
    """
    found = state.topics.get(topic)
    if found is None or (found.topic_id, partition) not in group.positions or offset < 0:
        return None, None
    ref = (found.topic_id, partition, offset)
    return ref, failed_messages.get(state, group, ref)


def unknown_letter(group: ConsumerGroup, place: TopicOffset) -> UnknownLetter:
    """Return the refusal of what a group has not, or no longer, as a dead letter, and
    does not retry either.
    """
    topic, partition, offset = place
    message = f"consumer group {group.name!r} has no dead letter {topic}/{partition}/{offset}"
    hint = "see txmq dlq list, txmq retry list; for what was processed, txmq trace"
    return UnknownLetter(message, hint=hint)


def closed_reason(row: FailedMessage | None, token: bytes = b"") -> str:
    """Return why this is not an open dead letter; "" if it is one.

    A letter that an undecided transaction replays is open only to that `token`.
    """
    if row is None:
        return "no such letter"
    if row.kind == FailedKind.ABANDONED:
        return "abandoned"
    if row.kind == FailedKind.LOCAL:
        return "not dead: a consumer retries it from its local store, see txmq retry"
    if row.kind != FailedKind.LETTER:
        return "not dead: it is retried, see txmq retry"
    return "an undecided transaction replays it" if row.token not in (b"", token) else ""


def held_reason(state: State, row: FailedMessage) -> str:
    """Return why only its plan replays this letter; "" = it has none that is
    unfinished.
    """
    plan = plan_letters.holder(state, row.plan)
    return "" if plan is None else f"in plan {plan.name}"


def _never(_state: State, _row: FailedMessage) -> str:
    return ""


def apply_failed(state: State, event: Retried | DeadLettered, context: RecordContext) -> None:
    group, at = state.groups.by_id[event.group_id], context.stored_at
    topic_id, partition, offset, row = failed_rows.decode_move(event.moves[0])
    ref = (topic_id, partition, offset)
    if group.breaker is not None:
        circuit_breaker.record_probe_failure(group, leases.lease_of(group, ref), at)
    elif not isinstance(event, Retried) or event.failed:
        circuit_breaker.record_failure(group, ref, row, at)
    if not isinstance(event, Retried) or event.failed:
        failed_changes.sweep(state, group.group_id, ref)
        attempts.record(state, group, ref, row, at)
    key_fences.apply_changes(state, group, event.moves, event.fences, at)


def apply_breaker_opened(state: State, event: GroupGuarded, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    circuit_breaker.open_breaker(group, event.fingerprint, event.error_type, context.stored_at)
    state.groups.dirty_groups.add(event.group_id)


def apply_letters_changed(
    state: State, event: Replayed | Abandoned, context: RecordContext
) -> None:
    group = state.groups.by_id[event.group_id]
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)


DECIDERS: Deciders = {
    NackMessage: decide_nack,
    ReplayLetters: decide_replay,
    AbandonLetters: decide_abandon,
}
APPLIERS: Appliers = {
    Retried: apply_failed,
    DeadLettered: apply_failed,
    GroupGuarded: apply_breaker_opened,
    Replayed: apply_letters_changed,
    Abandoned: apply_letters_changed,
}
