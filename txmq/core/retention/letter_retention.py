"""Dead letters are kept for a time of their own, abandoned ones too; then what waited
for them goes on.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import acks, changes, failed_messages
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.failed_messages import Kind
from txmq.core.events.consumers import LettersExpired
from txmq.core.state.state import Outcome
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spotted
    from txmq.core.state.state import State

AT_ONCE = 250  # letters looked at in one command, so that no apply takes long


class ExpireLetters(NamedTuple):
    """Take away letters that are too old, of those after number `after`; `default` (µs,
    0 = never) is the broker's.

    The reply is the number to go on after, 0 = there are no more.
    """

    group_id: int
    after: int
    default: int


def decide_expire(state: State, command: ExpireLetters, now: int) -> Outcome:
    group = state.consumers.by_id.get(command.group_id)
    if group is None:
        return Outcome(reply=0)
    looked = list(islice(_letters(state, group, command.after), AT_ONCE))
    made = Changes(state, group, now)
    over: list[Spotted] = []
    for _number, spotted, row in looked:
        time = _kept(state, spotted, command.default)
        if time and row.dead_at < now - time and not row.token:
            over.append(spotted)
            if row.kind == Kind.LETTER:
                made.done(spotted, row.key_hash)
    following = looked[-1][0] if len(looked) == AT_ONCE else 0
    event = LettersExpired(group.group_id, tuple(over), made.moves, made.fences)
    return Outcome((event,) if over else (), following)


def _letters(state: State, group: Group, after: int) -> Iterator[tuple[int, Spotted, Moved]]:
    low, high = (
        t.LETTER_KEY.pack(group.group_id, after + 1),
        t.LETTER_KEY.pack(group.group_id, t.SIGN),
    )
    rows: Any = state.tables[t.LETTERS].range(low, high)
    for key, at in rows:
        spotted = tuple(at)
        row = failed_messages.get(state, group, spotted)
        assert row is not None, "in the index, so it is there"
        yield t.LETTER_KEY.unpack(key)[1], spotted, row


def _kept(state: State, spotted: Spotted, default: int) -> int:
    own = state.topics_by_id[spotted[0]].settings.letters_us
    return default if own < 0 else own


def apply_expired(state: State, event: LettersExpired, place: Place) -> None:
    group = state.consumers.by_id[event.group_id]
    changes.apply(state, group, event.moves, event.fences, place.stored_at)
    for raw in event.rows:
        topic_id, partition, offset = raw
        acks.settle_row(state, group, (topic_id, partition, offset))


DECIDERS: dict[type, Any] = {ExpireLetters: decide_expire}
APPLIERS: dict[type, Any] = {LettersExpired: apply_expired}
