"""Compaction of the inbox: rows of single messages become ranges.

There is one row per partition and consumer group. Gaps stay: offsets of messages that
were skipped, parked or dead-lettered, until a replay fills them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from txmq.errors import DatabaseConflict
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import HERE, Position, lock_key

_POSITIONS: Final = (
    "SELECT DISTINCT grp, log_id::text, topic_id, partition, epoch FROM public.txmq_inbox_recent"
    " WHERE grp = %s::text AND log_id = %s::uuid"
)
# A handler under REPEATABLE READ reads with a snapshot from before it held the lock. A
# row stays where it conflicts with such a handler's claim, until no snapshot in the
# database is older than the row's commit.
_OLDEST_SNAPSHOT: Final = """
(SELECT max(age(backend_xmin)) FROM pg_stat_activity WHERE datname = current_database()
    AND pid <> pg_backend_pid())
"""
_COMPACT: Final = f"""
SELECT set_config('lock_timeout', %(lock_timeout_ms)s::text, true);
SELECT pg_advisory_xact_lock(%(lock)s::int8);
WITH moved AS (
    DELETE FROM public.txmq_inbox_recent
    WHERE {HERE}
      AND age(xmin) > coalesce({_OLDEST_SNAPSHOT}, -1)
    RETURNING "offset"
), folded AS (
    INSERT INTO public.txmq_inbox AS known (grp, log_id, topic_id, partition, epoch, applied)
    SELECT %(group)s::text, %(log_id)s::uuid, %(topic_id)s::int8, %(partition)s::int,
        %(epoch)s::int8,
        range_agg(int8range("offset", "offset" + 1)) FROM moved
    HAVING count(*) > 0
    ON CONFLICT (grp, log_id, topic_id, partition, epoch)
    DO UPDATE SET applied = known.applied + EXCLUDED.applied
)
SELECT count(*) FROM moved
"""  # noqa: S608  # constants
# Autovacuum runs once a minute: by then a busy inbox has left hundreds of megabytes of
# dead rows behind. A role that may not vacuum the table gets a warning, and autovacuum
# does it.
_VACUUM: Final = "VACUUM (TRUNCATE false) public.txmq_inbox_recent"
VACUUM_AFTER = 10_000  # rows moved by one compaction


class CompactionReport(NamedTuple):
    """The number of rows moved, and the positions whose handlers held the lock too
    long.
    """

    moved: int
    busy: list[Position]


async def compact(
    driver: Driver, group: str, log_id: str, *, lock_timeout_ms: int = 100
) -> CompactionReport:
    """Compact the rows of `group`, partition by partition, each in a transaction.

    The connection is one of txmq's own, in autocommit mode. Call it every few seconds.
    While it waits for a lock it holds up the partition's next handlers: hence the
    time-out. Raises DatabaseError.
    """
    with translated("compacting the inbox"):
        found = await driver.execute(_POSITIONS, (group, log_id))
    positions = [Position(*row) for row in found]
    moved, busy = 0, []
    for position in positions:
        try:
            moved += await _compact_position(driver, position, lock_timeout_ms)
        except DatabaseConflict:
            busy.append(position)
    if moved >= VACUUM_AFTER:
        with translated("vacuuming the inbox"):
            await driver.execute(_VACUUM)
    return CompactionReport(moved, busy)


async def _compact_position(driver: Driver, position: Position, lock_timeout_ms: int) -> int:
    values = {
        **position._asdict(),
        "lock": lock_key(position),
        "lock_timeout_ms": str(lock_timeout_ms),
    }
    with translated("compacting the inbox"):
        [(moved,)] = await driver.execute(_COMPACT, values)
    return int(moved)
