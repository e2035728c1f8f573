"""Single messages from a large backlog.

A scale of 10 makes it 100 million messages: about 17 GiB of disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.brokers import FLUSH_10_MS, broker
from tests.bench.harness import measured, python, sampled
from tests.bench.rows import Row, Run, at_most, benchmark, row

CLIENT = "tests.bench.clients.search"
MESSAGES, LOOKS, WITHIN_S = 10_000_000, 1_000, 7_200.0
MIB = 1 << 20


@benchmark("store.find", "one message out of a backlog: by a random offset, by its key")
def find(run: Run) -> Iterator[Row]:
    messages = run.count(MESSAGES)
    with broker(run, FLUSH_10_MS) as program, sampled(program.rss_anon, 1.0) as samples:
        took = measured(python(CLIENT, program.address, messages, LOOKS), WITHIN_S)
    of = f"{messages / 1e6:g} M messages of 100 B with keys of their own"
    for look, what, limit in (
        ("fetch", "fetch at a random offset", 5),
        ("find", "find by key", 50),
    ):
        yield row(
            f"store.find_{look}_p50", f"{what}, {of}: p50", "ms", took[f"{look}_p50_us"] / 1e3
        )
        p99 = took[f"{look}_p99_us"] / 1e3
        yield row(f"store.find_{look}_p99", f"{what}, {of}: p99", "ms", p99, goal=at_most(limit))
    yield row(
        "store.find_rss",
        f"RssAnon of the broker, most, {of}",
        "MiB",
        max(samples) / MIB,
        goal=at_most(250),
    )
