"""The inbox: duplicate check and effect in one PostgreSQL transaction.

A message is identified by its first place: log, topic id, partition and offset of the
original, and the epoch that a reset of the consumer group raises. The place of a retry
or a replay does not count, and neither do names of topics or brokers: another topic may
get them.

Handlers take a shared lock before they read, the compaction takes it exclusively.
Otherwise a row could move into the ranges after a handler has read the ranges and
before it reads the rows, and the effect would come twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Final, NamedTuple

from txmq.tx.postgres.caller import failure
from txmq.tx.postgres.driver import Driver, array
from txmq.tx.postgres.errors import DriverError, translated

# The claim itself is in schema.sql.
HERE: Final = (
    "grp = %(group)s::text AND log_id = %(log_id)s::uuid AND topic_id = %(topic_id)s::int8"
    " AND partition = %(partition)s::int AND epoch = %(epoch)s::int8"
)
_APPLIED: Final = f"""
SELECT lower(r), upper(r) FROM unnest(
    coalesce((SELECT applied FROM public.txmq_inbox WHERE {HERE}), '{{}}'::int8multirange)
    + coalesce((SELECT range_agg(int8range("offset", "offset" + 1)) FROM public.txmq_inbox_recent
        WHERE {HERE}),
               '{{}}'::int8multirange)) r
ORDER BY 1
"""  # noqa: S608  # constants

_RUN: Final = f"SELECT run::text FROM public.txmq_inbox WHERE {HERE}"  # noqa: S608  # constants
_NOTE_RUN: Final = """
INSERT INTO public.txmq_inbox AS known (grp, log_id, topic_id, partition, epoch, applied, run)
VALUES (%(group)s::text, %(log_id)s::uuid, %(topic_id)s::int8, %(partition)s::int, %(epoch)s::int8,
    '{}', %(run)s::uuid)
ON CONFLICT (grp, log_id, topic_id, partition, epoch) DO UPDATE SET run = EXCLUDED.run
WHERE known.run IS DISTINCT FROM EXCLUDED.run
"""


class Position(NamedTuple):
    """The history of a partition for one consumer group, since it was last to be
    processed again. `log_id` is the broker's log, as a text.
    """

    group: str
    log_id: str
    topic_id: int
    partition: int
    epoch: int = 0


class AppliedRanges(NamedTuple):
    """Offsets with a committed effect: disjoint ranges in order, ends excluded."""

    ranges: tuple[tuple[int, int], ...]

    def floor(self, start: int = 0) -> int:
        """Return the lowest offset from `start` that is not applied.

        A consumer has to go on from there at the latest.
        """
        for first, end in self.ranges:
            if first > start:
                break
            start = max(start, end)
        return start

    def covers(self, offset: int) -> bool:
        """Return whether the message at `offset` is applied."""
        at = bisect_right(self.ranges, offset, key=itemgetter(0)) - 1
        return at >= 0 and offset < self.ranges[at][1]


Wanted = Mapping[Position, Iterable[int]]
Claims = frozenset[tuple[Position, int]]


@lru_cache(maxsize=4_096)
def lock_key(position: Position) -> int:
    """Return the key of a position's advisory lock.

    It shares the database's 64-bit keys with the service's own locks.
    """
    group, log_id, topic_id, partition, _epoch = position
    name = f"txmq.inbox/{group}/{log_id}/{topic_id}/{partition}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


async def claim(driver: Driver, wanted: Wanted, *, first: str = "") -> Claims:
    """Claim messages for this transaction; return those that were not applied before.

    Call it in the transaction of the effect, which drops the claims if it rolls back.
    It waits for another transaction that has claimed one of the messages. `first` is
    sent before it in the same round trip: BEGIN, for a connection in autocommit mode,
    whose transaction `guarded_commit` then ends. Raises DatabaseConflict where the
    whole transaction is to be run again (REPEATABLE READ and higher), DatabaseError.
    """
    positions, calls, names = sorted(wanted), list[str](), list[str]()
    for number, position in enumerate(positions):  # in one order for all, against deadlocks
        group, log_id, topic_id, partition, epoch = position
        place = f"{topic_id}, {partition}, {epoch}, {lock_key(position)}"
        calls.append(
            f"SELECT {number}, public.txmq_claim(%s::text, %s::uuid, {place}, %s::text::int8[])"
        )
        names += group, log_id, array(sorted(wanted[position]))
    try:
        found = await driver.execute(first + " UNION ALL ".join(calls), names)
    except DriverError as error:
        raise failure(error, "claiming messages in the inbox") from None
    return frozenset((positions[number], offset) for number, offset in found)


async def applied(driver: Driver, position: Position) -> AppliedRanges:
    """Return the ranges applied at `position`, compacted or not. Raises
    DatabaseError.
    """
    with translated("reading the inbox"):
        return AppliedRanges(tuple(await driver.execute(_APPLIED, position._asdict())))


async def noted_run(driver: Driver, position: Position) -> str | None:
    """Return the run of the broker that was noted last; None = none was. Raises
    DatabaseError.
    """
    with translated("reading the inbox"):
        rows = await driver.execute(_RUN, position._asdict())
    return rows[0][0] if rows else None


async def note_run(driver: Driver, position: Position, run: str) -> None:
    """Note the run of the broker whose messages are applied from now on. Raises
    DatabaseError.
    """
    with translated("noting a run in the inbox"):
        await driver.execute(_NOTE_RUN, position._asdict() | {"run": run})
