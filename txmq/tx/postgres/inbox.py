"""Exactly one effect: the check for a duplicate is part of the transaction that has the effect.

A message is known by where it first stood: topic, partition and offset of the original, and the epoch that a consumer
group's reset raises. Never by the place of a retry or a replay.

Handlers take a shared lock before they look, the folder (`folding`) takes it alone: else a row could move into the
ranges after the look at the ranges and before the look at the rows, and the effect would come twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from txmq.tx.postgres.session import Connection, Cursor
from txmq.tx.postgres.translate import translated

_HERE: Final = "grp = %(group)s AND topic = %(topic)s AND partition = %(partition)s AND epoch = %(epoch)s"
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED; "
# One query string, yet the INSERT has a snapshot of its own, taken when the lock is held. Under REPEATABLE READ it has
# not: what was applied after the transaction's snapshot is then still among the recent rows, since the folder leaves
# rows alone that somebody may not see yet, and the conflict with it raises 40001. In order, so that batches queue up
# instead of blocking one another.
_CLAIM: Final = f"""
SELECT pg_advisory_xact_lock_shared(%(lock)s);
INSERT INTO public.txmq_inbox_recent (grp, topic, partition, epoch, "offset")
SELECT %(group)s, %(topic)s, %(partition)s, %(epoch)s, o FROM unnest(%(offsets)s::int8[]) o
WHERE NOT EXISTS (SELECT FROM public.txmq_inbox WHERE {_HERE} AND applied @> o)
  AND NOT EXISTS (SELECT FROM public.txmq_inbox_recent WHERE {_HERE} AND "offset" = o)
ORDER BY o ON CONFLICT DO NOTHING RETURNING "offset"
"""  # noqa: S608 (constants)
_APPLIED: Final = f"""
SELECT lower(r), upper(r) FROM unnest(
    coalesce((SELECT applied FROM public.txmq_inbox WHERE {_HERE}), '{{}}'::int8multirange)
    + coalesce((SELECT range_agg(int8range("offset", "offset" + 1)) FROM public.txmq_inbox_recent WHERE {_HERE}),
               '{{}}'::int8multirange)) r
ORDER BY 1
"""  # noqa: S608 (constants)


class Position(NamedTuple):
    """What offsets count in: a partition's history as one consumer group sees it since its last reset."""

    group: str
    topic: str
    partition: int
    epoch: int = 0


class AppliedRanges(NamedTuple):
    """Offsets whose effect is committed: disjoint ranges in order, ends excluded."""

    ranges: tuple[tuple[int, int], ...]

    def floor(self, start: int = 0) -> int:
        """The lowest offset from `start` that is not applied: where a consumer has to go on, at the latest."""
        for first, end in self.ranges:
            if first > start:
                break
            start = max(start, end)
        return start


def lock_key(position: Position) -> int:
    """The advisory lock of a position. It shares the database's 64-bit keys with the service's own locks."""
    name = f"txmq.inbox/{position.group}/{position.topic}/{position.partition}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def apply_once(cursor: Cursor, position: Position, offset: int, *, begin: bool = False) -> bool:
    """Whether the message at `offset` is to be applied now, by this transaction; False for one that was applied before.

    Called in the transaction of the effect, which takes the claim back if it rolls back. While another transaction has
    the same message in hand it waits for that one's end. `begin` opens the transaction in the same round trip, on a
    connection in autocommit mode; `guarded_commit` ends it.
    Raises DatabaseConflict where the whole transaction is to be run again (REPEATABLE READ and higher), DatabaseError.
    """
    return bool(apply_batch(cursor, position, [offset], begin=begin))


def apply_batch(cursor: Cursor, position: Position, offsets: Sequence[int], *, begin: bool = False) -> set[int]:
    """Those of `offsets` that this transaction is to apply; otherwise as `apply_once`, for one round trip in all."""
    values = {**position._asdict(), "lock": lock_key(position), "offsets": list(offsets)}
    with translated("claiming messages in the inbox"):
        cursor.execute((_BEGIN + _CLAIM) if begin else _CLAIM, values)
        return {offset for (offset,) in cursor.fetchall()}


def applied(connection: Connection, position: Position) -> AppliedRanges:
    """What is applied at `position`, folded or not. Raises DatabaseError."""
    with translated("reading the inbox"), connection.cursor() as cursor:
        cursor.execute(_APPLIED, position._asdict())
        return AppliedRanges(tuple(cursor.fetchall()))
