"""Trials: one delivery of a dead letter to one member. An operator awaits the outcome.

If the member fails it, leaves or gives no answer, it is a dead letter again at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, fetch_choice, key_fences
from txmq.core.consumers.authorization import find_group, find_member
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.letters import LetterTried
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_rows
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.trial_outcomes import KEPT
from txmq.errors import Conflict
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State


class TryLetter(NamedTuple):
    """Deliver an open letter to this member, once."""

    group: str
    letter: TopicOffset
    member: str
    by: str


class TrialReply(NamedTuple):
    """The number of the letter's last death: it has another one if it dies again."""

    number: int


def decide_try(state: State, command: TryLetter, now: int) -> Outcome:
    hint = "see the members: txmq group show"
    group, _member = find_member(state, command.group, command.member, hint)
    ref, row = failures.find_message(state, group, *command.letter)
    if ref is None or row is None:
        raise failures.unknown_letter(group, command.letter)
    changes = FailureChanges(state, group, now)
    reason = failures.closed_reason(row) or failures.held_reason(state, row)
    if reason := reason or _obstacle(group, ref, row, changes, command.member):
        place = "{}/{}/{}".format(*command.letter)
        message = f"dead letter {place} of {command.group!r} cannot be tried: {reason}"
        raise Conflict(message, hint="see txmq dlq show and txmq group show")
    changes.retry(ref, failed_rows.replayed_row(row)._replace(trial_by=command.member), now)
    event = LetterTried(group.group_id, *changes.fields(), command.by)
    return Outcome((event,), TrialReply(row.number))


def _obstacle(
    group: ConsumerGroup,
    ref: MessageRef,
    row: FailedMessage,
    changes: FailureChanges,
    member: str,
) -> str:
    """Return why the member would not get the letter now; "" = it would."""
    tp = TopicPartition(ref[0], ref[1])
    if not fetch_choice.may_try(group, member, tp):
        what = "has not this partition" if group.ordered else "does not read this topic"
        return f"{member!r} {what}"
    if changes.is_fenced(ref, row.key_hash):
        return "an earlier message of its key has failed, too"
    if group.is_stopped(tp):
        return "the group is paused, or being reset or cloned"
    return "" if group.breaker is None else "the group's circuit breaker is open"


def apply_tried(state: State, event: LetterTried, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)


class TrialOutcome(NamedTuple):
    """The outcome of a trial: "processed", "died again", "ended" or "unknown", or "no
    answer yet". A letter that was changed since is "abandoned" or "at a consumer".
    """

    outcome: str
    why: str = ""
    consumer: str = ""
    error_type: str = ""
    error_text: str = ""
    dead_at: int = 0


def outcome_of(state: State, name: str, letter: TopicOffset, number: int) -> TrialOutcome:
    """Return the outcome of the trial that began when the letter had this number."""
    group = find_group(state, name)
    ref, row = failures.find_message(state, group, *letter)
    if ref is None:
        return TrialOutcome("ended", "its topic was deleted, or the group reads it no more")
    if row is None:
        why = state.trials.outcome(group.group_id, ref, number)
        if why is None:
            known = f"{KEPT} other trials ended since, or the letter was changed: txmq trace"
            return TrialOutcome("unknown", known)
        return TrialOutcome("ended", why) if why else TrialOutcome("processed")
    if row.kind == FailedKind.LETTER:
        died = (row.consumer, row.error_type, row.error_text, row.dead_at)
        return TrialOutcome("died again", "", *died) if row.number != number else _WAITS
    return {
        FailedKind.ABANDONED: TrialOutcome("abandoned", row.reason),
        FailedKind.LOCAL: TrialOutcome("at a consumer"),
    }.get(FailedKind(row.kind), _WAITS)


_WAITS = TrialOutcome("no answer yet")


DECIDERS: Deciders = {TryLetter: decide_try}
APPLIERS: Appliers = {LetterTried: apply_tried}
