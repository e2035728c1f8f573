"""Expiry of dead letters and abandoned messages. The messages parked behind them go on
afterwards.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import acks, key_fences
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import LettersExpired
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_messages
from txmq.core.state.failed_rows import CLOSED, FailedKind
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

STEP_LETTERS = 250  # examined by one command, so that no apply takes long


class ExpireLetters(NamedTuple):
    """Remove the expired dead letters of a group, from those after number `after` on.

    `default` is the broker's retention (µs, 0 = for ever). The reply is the number to
    go on after; 0 = there are no more.
    """

    group_id: int
    after: int
    default: int


def decide_expire(state: State, command: ExpireLetters, now: int) -> Outcome:
    group = state.groups.by_id.get(command.group_id)
    if group is None:
        return Outcome(reply=0)
    letters = list(islice(_scan_letters(state, group, command.after), STEP_LETTERS))
    changes = FailureChanges(state, group, now)
    expired: list[MessageRef] = []
    keeps = group.settings.keep_until_exported
    for _number, ref, row in letters:
        if row is None:
            continue
        retention = _retention_of(state, ref, command.default)
        old = retention and row.dead_at < state.certain(now) - retention
        kept = keeps and not row.exported
        # a letter that its plan has put back is none
        if old and row.kind in CLOSED and not row.token and not kept:
            expired.append(ref)
            if row.kind == FailedKind.LETTER:
                changes.processed(ref, row.key_hash)
    following = letters[-1][0] if len(letters) == STEP_LETTERS else 0
    event = LettersExpired(group.group_id, tuple(expired), *changes.fields())
    return Outcome((event,) if expired else (), following)


def _scan_letters(
    state: State, group: ConsumerGroup, after: int
) -> Iterator[tuple[int, MessageRef, FailedMessage | None]]:
    """Yield letters by their numbers. None = it is processed, and not swept yet."""
    low, high = (
        t.LETTER_KEY.pack(group.group_id, after + 1),
        t.LETTER_KEY.pack(group.group_id, t.SIGN),
    )
    rows: Any = state.tables[t.LETTERS].range(low, high)
    for key, at in rows:
        ref = tuple(at)
        row = failed_messages.get(state, group, ref)
        yield t.LETTER_KEY.unpack(key)[1], ref, row


def _retention_of(state: State, ref: MessageRef, default: int) -> int:
    own = state.topics_by_id[ref[0]].settings.letters_us
    return default if own < 0 else own


def apply_expired(state: State, event: LettersExpired, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    for ref in event.rows:
        acks.settle_row(state, group, ref, "expired")
        state.groups.pass_over(group, ref)


DECIDERS: Deciders = {ExpireLetters: decide_expire}
APPLIERS: Appliers = {LettersExpired: apply_expired}
