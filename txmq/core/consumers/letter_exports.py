"""Exports: an operator has dead letters in a file, as they are now.

A group with the setting `keep_until_exported` keeps its letters until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.failures import LettersReply
from txmq.core.events.letters import LettersExported
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes
from txmq.core.state.failed_rows import FailedKind

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

KINDS = (FailedKind.LETTER, FailedKind.ABANDONED)


class NoteExported(NamedTuple):
    """Note that these letters are in a file: topic, partition, offset, number of the
    death, number of edits.
    """

    group: str
    letters: tuple[tuple[str, int, int, int, int], ...]
    by: str


def decide_exported(state: State, command: NoteExported, _now: int) -> Outcome:
    group = find_group(state, command.group)
    found: dict[MessageRef, TopicOffset] = {}
    refused: list[tuple[str, int, int, str]] = []
    for topic, partition, offset, *version in command.letters:
        ref, row = failures.find_message(state, group, topic, partition, offset)
        if reason := _refusal(row, version):
            refused.append((topic, partition, offset, reason))
        elif ref is not None:
            found[ref] = (topic, partition, offset)
    event = LettersExported(group.group_id, tuple(found), command.by)
    return Outcome((event,) if found else (), LettersReply(tuple(found.values()), tuple(refused)))


def _refusal(row: FailedMessage | None, version: list[int]) -> str:
    if row is None or row.kind not in KINDS:
        return failures.closed_reason(row)
    return "" if [row.number, row.edits] == version else failures.CHANGED_SINCE


def apply_exported(state: State, event: LettersExported, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    for topic_id, partition, offset in event.rows:
        ref = (topic_id, partition, offset)
        failed_changes.set_exported(state, group, ref, context.stored_at)


DECIDERS: Deciders = {NoteExported: decide_exported}
APPLIERS: Appliers = {LettersExported: apply_exported}
