"""Throughput of consumers: ordered and concurrent, with the inbox, beside a slow
message, with many retries.
"""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import msgpack

from tests.bench.brokers import broker
from tests.bench.harness import BenchError, in_turn, measured, python
from tests.bench.raw.threaded_commits import commits_per_s
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from txmq.core.state.positions import Grant, GroupPosition

CLIENTS = "tests.bench.clients"
KEYS, HANDLERS, BATCH = 10_000, 8, 50
STORED_OF = 100
SLOW_S, EACH_S = 600, 0.01  # handling time of the slow message, and of each other one


@benchmark("consumer.ordered", "one consumer of many keys, in their order")
def ordered(run: Run) -> Iterator[Row]:
    messages = run.count(200_000)

    def consumed(mode: str) -> float:
        with broker(run) as server:
            result = measured(
                python(f"{CLIENTS}.consume_keys", server.address, mode, KEYS, messages)
            )
        return float(result["per_s"])

    value, yardstick = in_turn(3, lambda: consumed("ordered"), lambda: consumed("concurrent"))
    what = f"one consumer, {KEYS:,} keys, each message acked: ordered, beside concurrent"
    yield row("consumer.ordered", what, "msg/s", value, yardstick=yardstick, goal=at_least(0.7))


@benchmark("recover.live", "consumption while some messages go to the local store")
def with_store(run: Run) -> Iterator[Row]:
    messages = run.count(200_000)

    def consumed(every: int) -> float:
        with broker(run) as server, TemporaryDirectory() as directory:
            argv = python(f"{CLIENTS}.consume_stored", server.address, directory, messages, every)
            return float(measured(argv)["per_s"])

    value, yardstick = in_turn(3, lambda: consumed(STORED_OF), lambda: consumed(0))
    what = f"one consumer, one message of {STORED_OF} goes to its local store, beside none"
    yield row("recover.live", what, "msg/s", value, yardstick=yardstick, goal=at_least(0.95))


@benchmark("consumer.inbox", "handlers with the inbox")
def inbox(run: Run) -> Iterator[Row]:
    dsn = run.database.dsn()

    def handled(kind: str, batch: int, messages: int, how: str = "rows") -> float:
        with broker(run) as server:
            argv = python(
                f"{CLIENTS}.with_inbox",
                server.address,
                dsn,
                HANDLERS,
                kind,
                batch,
                how,
                run.count(messages),
            )
            return float(measured(argv)["per_s"])

    single, batches, statements, without, without_batches, without_statements, alone = in_turn(
        3,
        lambda: handled("inbox", 0, 8_000),
        lambda: handled("inbox", BATCH, 160_000),
        lambda: handled("inbox", BATCH, 80_000, "statements"),
        lambda: handled("plain", 0, 8_000),
        lambda: handled("plain", BATCH, 160_000),
        lambda: handled("plain", BATCH, 80_000, "statements"),
        lambda: commits_per_s(dsn, HANDLERS, run.count(8_000)),
    )
    what = f"{HANDLERS} handlers in threads, each message a row, with the inbox"
    against = f"{what}: beside the same transactions without it"
    yield row("consumer.inbox", against, "msg/s", single, yardstick=without, goal=at_least(0.75))
    lists = f"{what}, {BATCH} messages per transaction"
    against = f"{lists}, their rows in one INSERT: beside one message each, without it"
    yield row(
        "consumer.inbox_batches", against, "msg/s", batches, yardstick=without, goal=at_least(5)
    )
    for name, how, value, yardstick in (
        ("batches_alike", "their rows in one INSERT: beside the same", batches, without_batches),
        ("statements", "an INSERT each: beside one message each,", statements, without),
        ("statements_alike", "an INSERT each: beside the same", statements, without_statements),
    ):
        yield row(
            f"consumer.inbox_{name}",
            f"{lists}, {how} without it",
            "msg/s",
            value,
            yardstick=yardstick,
        )
    yield row(
        "consumer.inbox_alone",
        f"{what}: beside the same commits without a consumer",
        "msg/s",
        single,
        yardstick=alone,
    )


@benchmark("consumer.slow", "one slow message in a partition")
def slow(run: Run) -> Iterator[Row]:
    messages = run.count(300_000)

    def consumed(kind: str) -> float:
        with broker(run) as server:
            result = measured(python(f"{CLIENTS}.slow", server.address, kind, messages))
        if result["unsettled"] != (kind == "held"):
            raise BenchError(f"{result['unsettled']} messages are left in the run {kind!r}")
        return float(result["per_s"])

    value, yardstick = in_turn(3, lambda: consumed("held"), lambda: consumed("free"))
    what = "messages of a partition while one of them is outstanding and its lease is extended"
    yield row(
        "consumer.slow",
        f"{what}: beside none",
        "msg/s",
        value,
        yardstick=yardstick,
        goal=at_least(0.95),
    )


@benchmark("consumer.gaps", "state of a partition with gaps")
def gaps(run: Run) -> Iterator[Row]:
    """Measure, in simulated time, a message that takes ten minutes.

    Most of the other messages of the partition are acked meanwhile, which leaves gaps.
    """
    position = GroupPosition()
    count = round(SLOW_S / EACH_S)
    position.remove_ready(0, count)
    position.leased.put(0, count, Grant(1, 1))
    for offset in range(1, count):
        if offset % 6:  # every sixth is still outstanding, which leaves gaps
            position.leased.cut(offset, offset + 1)
            position.settle(offset, offset + 1)
    size, pieces = len(msgpack.packb(position.to_row())), len(position.settled)
    what = (
        f"state of a partition in which one message takes {SLOW_S} s and {pieces:,} gaps are left"
    )
    yield row(
        "consumer.gaps",
        f"{what}: bytes per 1,000 gaps",
        "B",
        size / pieces * 1_000,
        goal=at_most(1_024),
    )


@benchmark("consumer.retries", "many messages that wait for their retry")
def retries(run: Run) -> Iterator[Row]:
    messages = run.count(1_000_000)
    with broker(run) as server:
        result = measured(
            python(f"{CLIENTS}.retries", server.address, server.process.pid, messages), 3_600
        )
    what = f"{messages:,} messages wait for their next delivery, at different times"
    yield row(
        "consumer.retries_memory",
        f"{what}: RssAnon",
        "MB",
        result["rss_anon"] / 1e6,
        goal=at_most(250),
    )
    for name in ("p50", "p99"):
        late = f"{what}: {result['watched']:,} due messages are late by {name}"
        yield row(
            f"consumer.retries_late_{name}",
            late,
            "ms",
            result[f"{name}_us"] / 1e3,
            goal=at_most(100),
        )
