"""A broker's start after it was killed, and the memory that is its own.

`TXMQ_BENCH_GIB=10 make bench ONLY=store.start` has so much in the log.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import txmq
from tests.bench.brokers import FLUSH_10_MS, broker, command, cpu_s
from tests.bench.filling import filling, volumes
from tests.bench.harness import measured, python, sampled, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from txmq.core.topics.topics import CreateTopic

BODIES = [bytes([n]) * 1_024 for n in range(100)]
CLIENTS = "tests.bench.clients"
MIB = 1 << 20
UNDER_LOAD = 128 * MIB  # of the log comes from a client, until the broker is killed
PARTITIONS = 4
READY_WITHIN_S = 300.0


def fill(address: str, size: int) -> None:
    """Send batches of 100 messages until the log has grown by about `size` bytes."""
    with txmq.connect(address, timeout=60) as client:
        for _ in range(size // sum(map(len, BODIES))):
            client.send_many("bench", BODIES)


@benchmark("store.start", "start-up after SIGKILL, by what is in the log")
def start(run: Run) -> Iterator[Row]:
    full = run.count(1_024 * int(os.environ.get("TXMQ_BENCH_GIB", "1"))) * MIB
    with tempfile.TemporaryDirectory(dir=run.directory) as name:
        argv = command(Path(name), FLUSH_10_MS)
        with serving(argv, READY_WITHIN_S) as program:
            yield row(
                "store.start_empty",
                "start-up with an empty log, interpreter included",
                "s",
                program.ready_after_s,
            )
        with filling(Path(name) / "data") as filler:
            filler.do([CreateTopic("bench", PARTITIONS)])
            filler.do(volumes(full - UNDER_LOAD, "bench", PARTITIONS), at_once=4)
        with serving(argv, READY_WITHIN_S) as program:
            fill(program.address, min(full, UNDER_LOAD))
            program.kill()
        with serving(argv, READY_WITHIN_S) as program:
            cpu = cpu_s(program.process.pid)
            what = f"start-up after SIGKILL under load, {full / 2**30:.2g} GiB of log"
            yield row("store.start_killed", what, "s", program.ready_after_s, goal=at_most(2.0))
            yield row(
                "store.start_cpu", f"the same: what the broker computed for it, {what}", "s", cpu
            )
            yield row(
                "store.start_rss",
                f"RssAnon right after that, {what}",
                "MiB",
                program.rss_anon() / MIB,
            )


@benchmark("store.rss", "memory of the broker's own")
def memory(run: Run) -> Iterator[Row]:
    with broker(run) as program:
        time.sleep(1)  # what happens once after the start is over
        yield row("store.rss_idle", "RssAnon, idle", "MiB", program.rss_anon() / MIB)
        with sampled(program.rss_anon) as samples:
            measured(python(f"{CLIENTS}.send_async", program.address, run.count(200_000), 10_000))
        yield row(
            "store.rss_load",
            "RssAnon, most, 10,000 sends of 1 KiB outstanding",
            "MiB",
            max(samples) / MIB,
        )
        with sampled(program.rss_anon) as samples:
            measured(python(f"{CLIENTS}.send_many", program.address, run.seconds(4), 1_024, 0))
        yield row(
            "store.rss_volumes",
            "RssAnon, most, columns of 1 KiB messages",
            "MiB",
            max(samples) / MIB,
        )
