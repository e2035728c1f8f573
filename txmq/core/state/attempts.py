"""The history of a failed message: its first failure, and the last ones.

Table `attempts` has a row for each message that has failed, at the key of its row in
table `failed`: the number of its failures, then those that are kept, oldest first. A
replay begins no new history. The history ends with the row of the message; that of a
dead letter that was processed ends when retention removes the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import plan_letters
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

KEPT_LAST = 8  # failures that are kept besides the first one
# The end of a traceback is the error itself. The newest text is whole in the row.
MAX_TEXT = 1_024  # characters


class Attempt(NamedTuple):
    """A failure of a message.

    `attempt` counts the deliveries since the last replay, `replays` the replays before
    it.
    """

    at: int
    attempt: int
    replays: int
    consumer: str
    error_type: str
    error_text: str
    fingerprint: str


class History(NamedTuple):
    """The attempts that are kept, oldest first, of `failures` in all."""

    failures: int = 0
    attempts: tuple[Attempt, ...] = ()


def get(state: State, group: ConsumerGroup, ref: MessageRef) -> History:
    """Return the history of a message; empty = it has not failed."""
    row: Any = state.tables[t.ATTEMPTS].get(t.FAILED_KEY.pack(group.group_id, *ref))
    return History() if row is None else History(row[0], tuple(Attempt(*one) for one in row[1:]))


def record(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    row: FailedMessage,
    at: int,
) -> None:
    """Apply: the message failed at the time `at`, and `row` has the error. Its plan is
    told, if it has one.
    """
    if row.plan:
        plan_letters.failed(state, row.plan, row.visible_at, ref, row.fingerprint)
    count, kept = get(state, group, ref)
    if len(kept) > KEPT_LAST:
        kept = (kept[0], *kept[2:])
    state.tables[t.ATTEMPTS].put(
        t.FAILED_KEY.pack(group.group_id, *ref),
        (count + 1, *map(tuple, kept), tuple(attempt_of(row, at))),
    )


def attempt_of(row: FailedMessage, at: int) -> Attempt:
    """Return the failure that a row tells of: its last one."""
    text = row.error_text
    return Attempt(
        at,
        row.attempt,
        row.replays,
        row.consumer,
        row.error_type,
        text if len(text) <= MAX_TEXT else "…" + text[1 - MAX_TEXT :],
        row.fingerprint,
    )
