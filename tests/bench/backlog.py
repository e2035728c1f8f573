"""Consumption of a backlog, by batches and message by message."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.brokers import FLUSH_10_MS, broker, cpu_s
from tests.bench.harness import measured, python
from tests.bench.rows import Goal, Row, Run, at_least, benchmark, row

CLIENTS = "tests.bench.clients"
BATCH = 1_000


def consumed(
    run: Run, name: str, size: int, batch: int, how: str, goal: Goal, count: int
) -> Iterator[Row]:
    """Measure one consumer process on a backlog in batches of `batch` messages."""
    count = max(batch, run.count(count) // batch * batch)
    with broker(run, FLUSH_10_MS) as program:
        measured(python(f"{CLIENTS}.backlog", program.address, count, size, batch))
        before = cpu_s(program.process.pid)
        took = measured(python(f"{CLIENTS}.consume", program.address, count, how))
        broker_us = (cpu_s(program.process.pid) - before) / count * 1e6
    stored = f"batches of {batch}" if batch > 1 else "singles"
    what = f"a backlog of {count:,} x {size} B stored as {stored}, consumed by {how}"
    yield row(f"consumer.backlog_{name}", what, "msg/s", took["per_s"], goal=goal)
    yield row(
        f"consumer.backlog_{name}_client_cpu", f"{what}: the client's CPU", "µs", took["cpu_us"]
    )
    yield row(f"consumer.backlog_{name}_broker_cpu", f"{what}: the broker's CPU", "µs", broker_us)


@benchmark("consumer.backlog", "a backlog consumed by one process")
def backlog(run: Run) -> Iterator[Row]:
    yield from consumed(run, "1kib", 1_024, BATCH, "batches", at_least(350_000), 1_000_000)
    yield from consumed(run, "100b", 100, BATCH, "batches", at_least(1_500_000), 1_000_000)
    yield from consumed(run, "singles", 1_024, 1, "batches", at_least(100_000), 200_000)
    yield from consumed(run, "one_by_one", 1_024, BATCH, "messages", at_least(200_000), 200_000)
