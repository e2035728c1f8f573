"""Messages that an inbox has applied, and a restored log has lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, plain_cursor

_APPLIED: Final = """
SELECT grp, topic_id, partition, epoch, lower(r), upper(r) FROM (
    SELECT grp, topic_id, partition, epoch, unnest(range_agg(s)) AS r FROM (
        SELECT grp, topic_id, partition, epoch, unnest(applied) AS s
        FROM public.txmq_inbox WHERE log_id = %(log_id)s
        UNION ALL
        SELECT grp, topic_id, partition, epoch, int8range("offset", "offset" + 1)
        FROM public.txmq_inbox_recent WHERE log_id = %(log_id)s) stored
    GROUP BY grp, topic_id, partition, epoch) ranges
ORDER BY 1, 2, 3, 5
"""


class LostEffects(NamedTuple):
    """Messages [start, end) of a partition that took effect, and that the log lacks."""

    group: str
    topic_id: int
    partition: int
    start: int
    end: int


class RestoredEnds(NamedTuple):
    """The epochs of a log's restores, and the end offsets of each topic's partitions at
    them, by topic id and epoch. `topics` are all ids that the log knows.
    """

    epochs: Sequence[int]
    ends: Mapping[tuple[int, int], Sequence[int]]
    topics: frozenset[int]


def lost_effects(
    connection: Connection, log_id: str, restored: RestoredEnds
) -> Iterator[LostEffects]:
    """Yield what the database has of a log's lost part. Raises DatabaseError."""
    with translated("reading inboxes"), plain_cursor(connection) as cursor:
        cursor.execute(_APPLIED, {"log_id": log_id})
        rows = cursor.fetchall()
    for group, topic_id, partition, epoch, start, end in rows:
        at = _lost_from(restored, topic_id, partition, epoch)
        if at is not None and at < end:
            yield LostEffects(group, topic_id, partition, max(start, at), end)


def _lost_from(restored: RestoredEnds, topic_id: int, partition: int, epoch: int) -> int | None:
    """Return the offset from which on messages of an epoch are lost; None = none is."""
    if topic_id not in restored.topics:
        return 0  # the topic was made in the lost part
    ends = [
        ends[partition] if partition < len(ends) else 0
        for later in restored.epochs
        if epoch < later and (ends := restored.ends.get((topic_id, later))) is not None
    ]
    return min(ends, default=None)
