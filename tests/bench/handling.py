"""What consumers get done: in order and without, with the inbox, beside a slow message,
with many retries waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgpack

from tests.bench.brokers import broker
from tests.bench.harness import BenchError, in_turn, measured, python
from tests.bench.raw.taken_commits import commits_per_s
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from txmq.core.state.positions import Grant, Position

CLIENTS = "tests.bench.clients"
KEYS, HANDLERS, BATCH = 10_000, 8, 50
SLOW_S, EACH_S = 600, 0.01  # a handler's time for one message, and for each of the others


@benchmark("consumer.ordered", "one consumer of many keys, in their order")
def ordered(run: Run) -> Iterator[Row]:
    messages = run.count(200_000)

    def taken(mode: str) -> float:
        with broker(run) as server:
            told = measured(python(f"{CLIENTS}.taking", server.address, mode, KEYS, messages))
        return float(told["per_s"])

    value, yardstick = in_turn(3, lambda: taken("ordered"), lambda: taken("concurrent"))
    what = f"one consumer takes and acks messages of {KEYS:,} keys one by one: ordered, against concurrent"
    yield row("consumer.ordered", what, "msg/s", value, yardstick=yardstick, goal=at_least(0.7))


@benchmark("consumer.inbox", "handlers with the inbox")
def inbox(run: Run) -> Iterator[Row]:
    dsn = run.database.dsn()

    def handled(way: str, batch: int, messages: int, how: str = "rows") -> float:
        with broker(run) as server:
            argv = python(
                f"{CLIENTS}.with_inbox",
                server.address,
                dsn,
                HANDLERS,
                way,
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
    against = f"{what}: against the same transactions of handlers without it"
    yield row("consumer.inbox", against, "msg/s", single, yardstick=without, goal=at_least(0.75))
    lists = f"{what}, {BATCH} messages in a transaction"
    against = f"{lists}, their rows in one INSERT: against one in each, without it"
    yield row(
        "consumer.inbox_batches", against, "msg/s", batches, yardstick=without, goal=at_least(5)
    )
    for name, how, value, yardstick in (
        ("batches_alike", "their rows in one INSERT: against the same", batches, without_batches),
        ("statements", "an INSERT each: against one in each,", statements, without),
        ("statements_alike", "an INSERT each: against the same", statements, without_statements),
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
        f"{what}: against the same commits by no consumer",
        "msg/s",
        single,
        yardstick=alone,
    )


@benchmark("consumer.slow", "one slow message in a partition")
def slow(run: Run) -> Iterator[Row]:
    messages = run.count(300_000)

    def taken(way: str) -> float:
        with broker(run) as server:
            told = measured(python(f"{CLIENTS}.slow", server.address, way, messages))
        if told["lag"] != (way == "held"):
            raise BenchError(f"{told['lag']} messages are left where one was {way}")
        return float(told["per_s"])

    value, yardstick = in_turn(3, lambda: taken("held"), lambda: taken("free"))
    what = "messages of a partition of which one is in hand from the first to the last, its lease extended again and again"
    yield row(
        "consumer.slow",
        f"{what}: against none",
        "msg/s",
        value,
        yardstick=yardstick,
        goal=at_least(0.95),
    )


@benchmark("consumer.gaps", "what is known of a partition with gaps")
def gaps(run: Run) -> Iterator[Row]:
    """In simulated time: one message is in hand for ten minutes, while others are acked
    in whatever order.
    """
    position = Position()
    count = round(SLOW_S / EACH_S)
    position.take(0, count)
    position.leased.put(0, count, Grant(1, 1))
    for offset in range(1, count):
        if offset % 6:  # every sixth is still in hand, so that there are gaps
            position.leased.cut(offset, offset + 1)
            position.settle(offset, offset + 1)
    size, pieces = len(msgpack.packb(position.to_row())), len(position.settled)
    what = f"what is stored of a partition in which one message takes {SLOW_S} s and {pieces:,} gaps are left"
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
        told = measured(
            python(f"{CLIENTS}.retrying", server.address, server.process.pid, messages), 3_600
        )
    what = f"{messages:,} messages wait for their next delivery, each for a time of its own"
    yield row(
        "consumer.retries_memory",
        f"{what}: RssAnon",
        "MB",
        told["rss_anon"] / 1e6,
        goal=at_most(250),
    )
    for name in ("p50", "p99"):
        late = f"{what}: {told['watched']:,} that are due come later by {name}"
        yield row(
            f"consumer.retries_late_{name}", late, "ms", told[f"{name}_us"] / 1e3, goal=at_most(100)
        )
