"""The size of the inbox after millions of messages, and the rate of its claims."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from random import Random
from uuid import UUID

import psycopg2

from tests.bench.rows import Row, Run, benchmark, row
from txmq.tx.postgres.blocking import claim, compact
from txmq.tx.postgres.caller import BEGIN
from txmq.tx.postgres.inbox import Position
from txmq.tx.postgres.schema import install
from txmq.tx.postgres.session import Connection

GROUP, LOG_ID, TOPIC_ID, PARTITIONS = "billing", str(UUID(int=1)), 1, 16
MESSAGES, BATCH = 10_000_000, 500
SKIPPED = 0.001  # share of the offsets: dead letters, which leave gaps until a replay
FOLD_EVERY_S = 2.0
TABLES = ("public.txmq_inbox", "public.txmq_inbox_recent")


@benchmark("tx.inbox", "the inbox after many messages")
def inbox(run: Run) -> Iterator[Row]:
    messages, random = run.count(MESSAGES), Random(7)
    with (
        closing(psycopg2.connect(run.database.dsn())) as ours,
        closing(psycopg2.connect(run.database.dsn())) as upkeep,
    ):
        ours.autocommit = upkeep.autocommit = True
        install(ours)
        began = folded = time.perf_counter()
        largest = 0
        for number in range(messages // BATCH):
            partition, first = number % PARTITIONS, number // PARTITIONS * BATCH
            offsets = [
                offset for offset in range(first, first + BATCH) if random.random() >= SKIPPED
            ]
            with ours.cursor() as cursor:
                claim(
                    cursor.connection,
                    {Position(GROUP, LOG_ID, TOPIC_ID, partition): offsets},
                    first=BEGIN,
                )
                cursor.execute("COMMIT")
            if time.perf_counter() - folded >= FOLD_EVERY_S:
                compact(upkeep, GROUP, LOG_ID)
                folded, largest = time.perf_counter(), max(largest, _bytes(upkeep))
        took = time.perf_counter() - began
        compact(upkeep, GROUP, LOG_ID)
        end, ranges = _bytes(upkeep), _ranges(upkeep)
    what = (
        f"after {messages:,} messages, one in {round(1 / SKIPPED):,} left out,"
        f" folded every {FOLD_EVERY_S:.0f} s"
    )
    yield row(
        "tx.inbox_claims",
        f"messages claimed and committed, {BATCH} per transaction",
        "msg/s",
        messages / took,
    )
    yield row("tx.inbox_size", f"inbox tables {what}", "MiB", end / 2**20)
    yield row(
        "tx.inbox_size_largest", f"largest size of the inbox tables {what}", "MiB", largest / 2**20
    )
    yield row("tx.inbox_ranges", f"ranges in the inbox {what}", "ranges", ranges)


def _bytes(connection: Connection) -> int:
    return _number(
        connection,
        "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s) name",
        list(TABLES),
    )


def _ranges(connection: Connection) -> int:
    return _number(
        connection,
        "SELECT coalesce(sum((SELECT count(*) FROM unnest(applied))), 0) FROM public.txmq_inbox",
    )


def _number(connection: Connection, query: str, *values: object) -> int:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        [(number,)] = cursor.fetchall()
    return int(number)
