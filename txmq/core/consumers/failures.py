"""What could not be processed: retried, then a dead letter, replayed or abandoned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import changes, circuit_breaker, key_fences, leases
from txmq.core.consumers import failed_messages as moved
from txmq.core.consumers.authorization import Claim, active, known
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.commands import AbandonLetters, Failure, Nack, ReplayLetters, TopicOffset
from txmq.core.consumers.failed_messages import Kind, Moved
from txmq.core.events.consumers import Abandoned, DeadLettered, GroupGuarded, Replayed, Retried
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import topics
from txmq.errors import BadRequest, NotLeased
from txmq.model.retry import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spotted

ERROR_TEXT = (
    4 << 10
)  # bytes kept of an error's text: enough for a stack trace, too little to fill a disk with
ERROR_NAME = 256  # bytes kept of an error's type and fingerprint
LONGEST_DELAY = 30 * 24 * 3_600 * 1_000_000  # that a consumer may ask for
LETTERS_AT_ONCE = 1_000  # of one command, so that no apply takes long
NAMES = {Kind.RETRY: "retry", Kind.PARKED: "parked", Kind.LETTER: "letter"}


class Source(NamedTuple):
    """Where the key of a failed message can be read: row `row` of the batch at this log
    position.
    """

    position: int
    length: int
    row: int


class NackReply(NamedTuple):
    """What became of the message. `moved`: "retry", "letter", or "parked" where another
    of its key is retried or dead.

    Messages of this key under leases below `fence_lease` must be given back
    unprocessed; 0 = its key has no fence. In an ordered group that is so, too, if the
    nack is refused with NotLeased, whose detail has the number.
    """

    moved: str
    attempt: int
    due_at: int
    fence_lease: int
    guarded: bool = False  # the group is: what waits at the consumer had better wait here


class LettersReply(NamedTuple):
    """Letters done with, and those refused with the reason."""

    done: tuple[TopicOffset, ...]
    refused: tuple[tuple[str, int, int, str], ...]


def locate(state: State, command: Nack) -> Source | None:
    """Where the engine reads the key hash that a nack needs; None = it needs none."""
    group = state.consumers.groups.get(command.group)
    if group is None:
        return None
    spotted, row = find(state, group, command.topic, command.partition, command.offset)
    if spotted is None or row is not None:
        return None
    for base, entry in topics.entries(state, *spotted):
        return Source(entry.position, entry.length, command.offset - base)
    return None


def decide_nack(state: State, command: Nack, now: int) -> Outcome | Rejected:
    found = active(state, command.group, command.member)
    if isinstance(found, Rejected):
        return found
    group, _member = found
    if command.delay is not None and not 0 <= command.delay <= LONGEST_DELAY:
        return Rejected(
            BadRequest,
            f"a delay of {command.delay} µs is out of range",
            f"0 to {LONGEST_DELAY} are possible",
        )
    claim = Claim(group, command.member, command.generation)
    claim.add(state, command.topic, command.partition, command.offset, command.offset + 1)
    if claim.stale:
        message = f"message {command.offset} of {command.topic}/{command.partition} is not leased to {command.member!r}"
        detail: dict[str, object] = {"fence_lease": group.next_lease}
        return Rejected(NotLeased, message, "it was acked, has moved, or its lease ran out", detail)
    spotted = (state.topics[command.topic].topic_id, command.partition, command.offset)
    failed = _failed(state, group, spotted, command, now)
    return _move_failed(Changes(state, group, now), group, spotted, failed, command, now)


def _failed(state: State, group: Group, spotted: Spotted, command: Nack, now: int) -> Moved:
    """The failed message as a row, its number of deliveries as it was when it went
    out.
    """
    row = moved.get(state, group, spotted)
    if row is None:
        row = _row_of(state, group, spotted, command.key_hash)
    failure = command.failure
    if command.postpone and failure == Failure():
        return row._replace(consumer=command.member)
    return row._replace(
        consumer=command.member,
        error_type=_cut(failure.type, ERROR_NAME),
        error_text=_cut(failure.text, ERROR_TEXT),
        fingerprint=_cut(failure.fingerprint, ERROR_NAME),
        first_failed_at=row.first_failed_at or now,
    )


def _row_of(state: State, group: Group, spotted: Spotted, key_hash: int | None) -> Moved:
    held = group.positions[spotted[:2]].leased.overlap(spotted[2], spotted[2] + 1)[0].value
    base, entry = topics.entries(state, *spotted)[0]
    deaths = group.leases[held.lease].deaths
    return moved.row_of(entry, spotted[2] - base, key_hash, attempt=held.attempt, deaths=deaths)


def _cut(text: str, most: int) -> str:
    return text.encode(errors="replace")[:most].decode(errors="ignore")


def _move_failed(
    made: Changes, group: Group, spotted: Spotted, row: Moved, command: Nack, now: int
) -> Outcome:
    due = leases.back_off(group, row.attempt, now, command.chance)
    if due is not None and command.delay is not None:
        due = now + command.delay
    action = _action(group, command)
    flood = (
        not command.dead
        and not command.postpone
        and circuit_breaker.floods(group, spotted, row, now)
    )
    if action is Action.POSTPONE:
        pause = _pause(group, command)
        made.retry(spotted, row._replace(attempt=row.attempt - 1), now + pause)
    elif action is Action.DEAD or due is None:
        made.bury(spotted, row)
    else:
        made.retry(spotted, row, due)
    after = made.moves[0].row
    event: DeadLettered | Retried = Retried(
        group.group_id, made.moves, made.fences, not command.postpone
    )
    if after.kind == Kind.LETTER:
        event = DeadLettered(group.group_id, made.moves, made.fences)
    before = group.fence(spotted[0], row.key_hash)
    born = before.born if before is not None and after.kind == Kind.PARKED else 0
    born = next((item.born for item in made.fences if item.state != key_fences.LIFTED), born)
    guarded = flood or group.flood is not None
    reply = NackReply(NAMES[Kind(after.kind)], after.attempt, after.due, born, guarded)
    began = (GroupGuarded(group.group_id, row.fingerprint, row.error_type),) if flood else ()
    return Outcome((event, *began), reply)


def _action(group: Group, command: Nack) -> Action:
    """What the consumer says, else what the group's policy says of such errors."""
    if command.dead:
        return Action.DEAD
    if command.postpone or group.flood is not None:
        return Action.POSTPONE
    return group.settings.policy.action((command.failure.type, *command.failure.bases))


def _pause(group: Group, command: Nack) -> int:
    """Until a postponed message comes again; a guarded group waits for its probe
    anyway.
    """
    if command.delay is not None:
        return command.delay
    return 0 if group.flood is not None else group.settings.policy.delays[0]


def decide_replay(state: State, command: ReplayLetters, now: int) -> Outcome | Rejected:
    def replay(made: Changes, spotted: Spotted, row: Moved) -> None:
        made.retry(spotted, replayed(row), now)

    return _with_letters(state, command, now, replay, Replayed)


def replayed(row: Moved) -> Moved:
    """The row of a letter that is to be delivered again: attempts count from the start,
    replays go on counting.
    """
    return row._replace(attempt=0, deaths=0, replays=row.replays + 1, token=b"")


def decide_abandon(state: State, command: AbandonLetters, now: int) -> Outcome | Rejected:
    if not command.reason:
        return Rejected(
            BadRequest, "a letter is abandoned for a reason", "say why: it is kept with the letter"
        )
    reason = _cut(command.reason, ERROR_TEXT)

    def close(made: Changes, spotted: Spotted, row: Moved) -> None:
        made.close(spotted, row, reason)

    return _with_letters(state, command, now, close, Abandoned)


def _with_letters(
    state: State,
    command: ReplayLetters | AbandonLetters,
    now: int,
    change: Callable[[Changes, Spotted, Moved], None],
    kind: type[Replayed | Abandoned],
) -> Outcome | Rejected:
    """Change each letter, in the order of publication, so that letters of one key
    become a chain in their order.
    """
    group, letters = known(state, command.group), command.letters
    if isinstance(group, Rejected):
        return group
    if len(letters) > LETTERS_AT_ONCE:
        message = f"{len(letters)} letters in one call"
        return Rejected(BadRequest, message, f"at most {LETTERS_AT_ONCE}: call again for the rest")
    made = Changes(state, group, now)
    found: list[tuple[Spotted, Moved, TopicOffset]] = []
    refused: list[tuple[str, int, int, str]] = []
    for letter in dict.fromkeys(letters):
        spotted, row = find(state, group, *letter)
        if why := not_open(row):
            refused.append((*letter, why))
        elif spotted is not None and row is not None:
            found.append((spotted, row, letter))
    found.sort(key=lambda item: (item[1].visible_at, item[0]))
    for spotted, row, _letter in found:
        change(made, spotted, row)
    event = kind(group.group_id, made.moves, made.fences, command.by)
    reply = LettersReply(tuple(letter for _spotted, _row, letter in found), tuple(refused))
    return Outcome((event,) if made else (), reply)


def find(
    state: State, group: Group, topic: str, partition: int, offset: int
) -> tuple[Spotted, Moved | None] | tuple[None, None]:
    """A message by its topic's name, and its row if it has left its place; nothing
    where the group does not read.
    """
    known_topic = state.topics.get(topic)
    if (
        known_topic is None
        or (known_topic.topic_id, partition) not in group.positions
        or offset < 0
    ):
        return None, None
    spotted = (known_topic.topic_id, partition, offset)
    return spotted, moved.get(state, group, spotted)


def not_open(row: Moved | None, token: bytes = b"") -> str:
    """Why this is no letter that can be replayed or closed; "" = it is one."""
    if row is None:
        return "no such letter"
    if row.kind != Kind.LETTER:
        return {Kind.ABANDONED: "abandoned"}.get(Kind(row.kind), "not dead: it is being retried")
    return "an undecided transaction replays it" if row.token not in (b"", token) else ""


def apply_failed(state: State, event: Retried | DeadLettered, place: Place) -> None:
    group = state.consumers.by_id[event.group_id]
    topic_id, partition, offset, row = moved.of(event.moves[0])
    spotted = (topic_id, partition, offset)
    circuit_breaker.probe_failed(group, leases.holder(group, spotted), place.stored_at)
    if not isinstance(event, Retried) or event.failed:
        circuit_breaker.note_failure(group, spotted, row, place.stored_at)
    apply_changes(state, event, place)


def apply_guarded(state: State, event: GroupGuarded, place: Place) -> None:
    circuit_breaker.begin(
        state.consumers.by_id[event.group_id], event.fingerprint, event.error_type, place.stored_at
    )
    state.consumers.dirty_groups.add(event.group_id)


def apply_changes(
    state: State, event: Retried | DeadLettered | Replayed | Abandoned, place: Place
) -> None:
    group = state.consumers.by_id[event.group_id]
    changes.apply(state, group, event.moves, event.fences, place.stored_at)


DECIDERS: dict[type, Any] = {
    Nack: decide_nack,
    ReplayLetters: decide_replay,
    AbandonLetters: decide_abandon,
}
APPLIERS: dict[type, Any] = {
    Retried: apply_failed,
    DeadLettered: apply_failed,
    GroupGuarded: apply_guarded,
    Replayed: apply_changes,
    Abandoned: apply_changes,
}
