"""All benchmarks, in the order in which they run."""

from __future__ import annotations

from tests.bench import (
    consuming,
    finding,
    handling,
    inbox,
    rebalancing,
    recovering,
    scaling,
    sends,
    starting,
    transactions,
    xa,
    yardsticks,
)
from tests.bench.rows import Benchmark

BENCHMARKS: tuple[Benchmark, ...] = (
    yardsticks.disk_rows,
    yardsticks.echo_rows,
    yardsticks.sink_rows,
    yardsticks.stream_rows,
    yardsticks.plain_commit_rows,
    sends.send_one,
    sends.send_64,
    sends.send_64_flushed,
    sends.send_64_threads,
    sends.send_many,
    sends.half_commit,
    sends.half_64,
    consuming.backlog,
    starting.start,
    starting.memory,
    scaling.sends_to_many,
    scaling.start_with_topics,
    scaling.start_with_halves,
    finding.find,
    transactions.row_and_message,
    transactions.commit_to_consumer,
    transactions.outbox,
    recovering.checkback,
    recovering.resolving,
    xa.two_databases,
    transactions.relay,
    rebalancing.rebalance,
    inbox.inbox,
    handling.ordered,
    handling.inbox,
    handling.gaps,
    handling.retries,
)
