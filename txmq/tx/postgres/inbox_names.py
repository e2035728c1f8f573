"""Inboxes that were stored by the names of topics, before version 4 of the tables.

Such rows belong to one topic of one log, and do not tell which. The first member that
gets the partition takes them over, where its broker can prove that they are its own.
Otherwise an operator decides: `txmq inbox`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import Position, lock_key

_ADOPT: Final = (
    "SELECT public.txmq_inbox_adopt(%s::text, %s::text, %s::int, %s::uuid, %s::int8, %s::int8,"
    " to_timestamp(%s::int8 / 1e6), %s::int8, %s::int8, %s::int8)"
)
_LIST: Final = (
    "SELECT grp, log_id::text, topic, partition, epoch, applied::text, stored_until"
    " FROM public.txmq_inbox_by_name ORDER BY grp, topic, partition, epoch, log_id"
)
_DISCARD: Final = """
WITH gone AS (
    DELETE FROM public.txmq_inbox_by_name WHERE grp = %s::text AND topic = %s::text RETURNING 1)
SELECT count(*) FROM gone
"""


class Adoption(Enum):
    """The end of an attempt to take over what was stored by name."""

    NONE = "none"
    ADOPTED = "adopted"
    UNCLEAR = "unclear"


class Evidence(NamedTuple):
    """The facts by which a broker proves that rows are those of its topic and group.

    `made_at` is when the topic was made, in microseconds; None = unknown. The group has
    settled all below `floor`, and was delivered all below `cursor`.
    """

    made_at: int | None
    floor: int | None
    cursor: int | None


NO_DOUBT: Final = Evidence(None, None, None)


class NamedPosition(NamedTuple):
    """The history of a partition that was stored by name. `log_id` is None where the
    consumer had one broker.
    """

    group: str
    log_id: str | None
    topic: str
    partition: int
    epoch: int
    applied: str
    stored_until: object


async def adopt(
    driver: Driver, position: Position, topic: str, evidence: Evidence = NO_DOUBT
) -> Adoption:
    """Take over what was stored by name for a position; without evidence, by an
    operator's word. Raises DatabaseError.
    """
    group, log_id, topic_id, partition, epoch = position
    names = (group, topic, partition, log_id, topic_id, epoch, *evidence, lock_key(position))
    with translated("taking over an inbox"):
        [(found,)] = await driver.execute(_ADOPT, names)
    return Adoption(found)


async def stored_by_name(driver: Driver) -> list[NamedPosition]:
    """Return what nobody has taken over. Raises DatabaseError."""
    with translated("listing inboxes stored by name"):
        return [NamedPosition(*row) for row in await driver.execute(_LIST)]


async def discard(driver: Driver, group: str, topic: str) -> int:
    """Drop what was stored by name, and return the number of rows. Raises
    DatabaseError.
    """
    with translated("discarding an inbox stored by name"):
        [(count,)] = await driver.execute(_DISCARD, (group, topic))
    return int(count)
