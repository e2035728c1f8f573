"""Letters that are to be delivered again and whose messages cannot be read: they become
dead letters again, so that nothing waits behind them.

A partition stands still before a damaged batch that was never delivered. A letter need
not stop it: an operator knows of the letter in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import DeadLettered
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_messages
from txmq.core.state.failed_rows import FailedKind
from txmq.model.retry import FailureReport

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.state import State

ERROR_TYPE = "MessagesDamaged"


class SetAside(NamedTuple):
    """Make a message that is damaged a dead letter again, if it was one."""

    group: str
    ref: MessageRef
    why: str


def decide_set_aside(state: State, command: SetAside, now: int) -> Outcome:
    group = state.groups.by_name.get(command.group)
    row = None if group is None else failed_messages.get(state, group, command.ref)
    if group is None or row is None or not row.number or not is_to_deliver(state, command):
        return Outcome()
    changes = FailureChanges(state, group, now)
    failure = failures.cut_failure(FailureReport(ERROR_TYPE, command.why, ERROR_TYPE))
    changes.dead_letter(command.ref, row._replace(consumer="", **failure))
    event = DeadLettered(group.group_id, *changes.fields())
    return Outcome((event,))


def is_to_deliver(state: State, command: SetAside) -> bool:
    """Return True if this message is to be delivered again."""
    group = state.groups.by_name.get(command.group)
    row = None if group is None else failed_messages.get(state, group, command.ref)
    return row is not None and row.kind == FailedKind.RETRY and not row.token


DECIDERS: Deciders = {SetAside: decide_set_aside}
APPLIERS: Appliers = {}
