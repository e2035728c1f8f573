"""How a committed transaction of PostgreSQL becomes a group at the broker: once,
whatever happens on the way.

What makes it once is the broker's mark of the source (FORMATS 2.1): a group moves it
from the LSN of the group before to its own, in the same record that stores the
messages, and is stored only where the mark stands at the one before. So a group that is
sent again, by this process, its successor or one that was thought dead, is passed over;
a group that follows a refused one is refused as well; and as LSNs only grow and marks
are never forgotten, it makes no difference how long the relay was away.

The token is derived from the transaction, so that a repeated one is known by its name
too. Its time is that of the commit. The broker refuses tokens older than a week,
because it has forgotten what became of them: then the next name of the same transaction
is taken, three days later each time, which every relay comes to in the same way.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import Final, NamedTuple
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.bundles import Storing, parts_of
from txmq.client.blocking.transaction.decisions import decide, state_of
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.tokens import VARIANT, VERSION
from txmq.errors import UnknownTransaction
from txmq.model import limits
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK
from txmq.relay.pgoutput import Committed
from txmq.relay.stream import Source
from txmq.wire.emitted import Emitted
from txmq.wire.group import Description, Part

STEP_MS: Final = (
    3 * 24 * 3600 * 1_000
)  # less than the week, so that one of the names is always young enough
CHECKER: Final = (
    "relay"  # nobody answers to it: a relay decides what it has stored, or its successor does
)
RANDOM: Final = (1 << 76) - 1 & ~(
    3 << 62
)  # the bits of a UUIDv7 that are neither its time, version nor variant


class Order(NamedTuple):
    """A transaction to be stored; `before` is the LSN that the mark stands at by
    then.
    """

    source: Source
    committed: Committed
    messages: tuple[Emitted, ...]
    before: int


def name_time(committed: Committed, step: int) -> int:
    """The time of a transaction's name, in milliseconds."""
    return committed.at // 1_000 + step * STEP_MS


def name_of(source: Source, committed: Committed, step: int) -> UUID:
    """The token of a transaction, a UUIDv7; `step` counts its names. It outlives a
    change of the timeline.
    """
    said = f"{source.system_id} {source.slot} {committed.lsn} {committed.at} {step}"
    low = int.from_bytes(sha256(said.encode()).digest()[:10], "big") & RANDOM
    return UUID(int=name_time(committed, step) << 80 | VERSION | VARIANT | low)


def first_step(committed: Committed, refused_ms: int) -> int:
    """The first name that is younger than what the broker has refused as too old."""
    return max(0, (refused_ms - committed.at // 1_000) // STEP_MS + 1)


def built(core: Core, order: Order, token: UUID, decider: tuple[object, ...]) -> list[Part]:
    """The parts of the group, by what is known of the topics. Raises as `client.send`
    does.
    """
    buffer = Buffer(core.topics)
    for topic, message, partition, born_at in order.messages:
        buffer.add(topic, message, born_at, partition)
    source, committed = order.source, order.committed
    mark = ("mark", source.mark(source.timeline), order.before, committed.lsn, committed.at)
    return parts_of(
        token, Description(decider, CHECKER, (mark,)), buffer.build(token).batches, limits.BATCH
    )


def at_once(core: Core, order: Order, token: UUID) -> Part | None:
    """The group in one part that is decided as it is stored; None = it is too large for
    that.
    """
    parts = built(core, order, token, ("local",))
    return parts[0]._replace(commit=True) if len(parts) == 1 else None


def store_in_parts(core: Core, order: Order, deadline: float) -> None:
    """Stores a group of any size and commits it. What an earlier attempt has left is
    finished, or cleared away.

    Raises as `client.send` does; SequenceGap where the mark stands elsewhere.
    """
    for step in count():
        token = name_of(order.source, order.committed, step)
        state = state_of(core, token, core.settings.timeout)
        if state is None:
            state = _stored(core, order, token, deadline)
        if (
            state is GroupState.OPEN
        ):  # cut off in the middle: what is missing might be cut otherwise today
            decide(core, token, ROLLBACK)
        if state is GroupState.UNDECIDED:
            decide(core, token, COMMIT)
        if state not in (None, GroupState.OPEN, GroupState.ROLLED_BACK):
            return


def _stored(core: Core, order: Order, token: UUID, deadline: float) -> GroupState | None:
    """Where the group stands once it is stored; None = the name is too old."""
    storing = Storing(core, built(core, order, token, ("checker", CHECKER)), deadline)
    storing.send()
    try:
        return GroupState(storing.receipt().state)
    except UnknownTransaction:
        return None
