"""Backups of a log, as events of it, and its restore from one, as an event of the
restored log.

Ids that count up go on where none of the lost part can have come: topics and boot
epochs at the seconds of the time of the restore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.base import BackupNoted, LogRestored, RestoreAccepted
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state.state import Restore
from txmq.errors import Conflict
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

EPOCHS_APART = 1_000_000  # resets between two restores, where the clock has gone back


class NoteBackup(NamedTuple):
    """Record that a backup has the log as it was at the time `taken_at`."""

    taken_at: int


class AcceptRestore(NamedTuple):
    """Record that an operator has dealt with what the last restore lost."""

    operator: str
    reason: str


def decide_backup(state: State, command: NoteBackup, now: int) -> Outcome:
    taken_at = min(command.taken_at, now)
    if taken_at <= state.backed_up_at:
        return Outcome()
    return Outcome((BackupNoted(taken_at),))


def apply_backup(state: State, event: BackupNoted, _context: RecordContext) -> None:
    state.backed_up_at = event.taken_at


def decide_accept(state: State, command: AcceptRestore, _now: int) -> Outcome:
    if not state.restores:
        raise Conflict("this log was never restored", hint="there is nothing to accept")
    if state.restores[-1].accepted:
        return Outcome()
    return Outcome((RestoreAccepted(*command),))


def apply_restored(state: State, event: LogRestored, context: RecordContext) -> None:
    last = state.restores[-1].epoch if state.restores else 0
    epoch = max(event.at, last + EPOCHS_APART)
    state.restores = (
        *state.restores,
        Restore(event.incarnation, context.position, event.at, event.stored_to, epoch),
    )
    state.boot_epoch = event.boot_epoch
    state.backed_up_at = event.stored_to  # the backup that it comes from has all of that
    state.next_topic_id = max(state.next_topic_id, event.at // SECOND)
    for topic in state.topics_by_id.values():
        topic.ends_at_restore.append((epoch, tuple(topic.end_offsets)))
        state.dirty_topics.add(topic.topic_id)


def apply_accepted(state: State, _event: RestoreAccepted, _context: RecordContext) -> None:
    *before, last = state.restores
    state.restores = (*before, last._replace(accepted=True))


DECIDERS: Deciders = {AcceptRestore: decide_accept, NoteBackup: decide_backup}
APPLIERS: Appliers = {
    BackupNoted: apply_backup,
    LogRestored: apply_restored,
    RestoreAccepted: apply_accepted,
}
