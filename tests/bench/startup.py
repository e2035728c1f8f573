"""Start-up time of a broker after SIGKILL, and its memory.

`TXMQ_BENCH_GIB=10 make bench ONLY=store.start` makes a log of that size.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import txmq
from tests.bench.brokers import FLUSH_10_MS, broker, command, cpu_s
from tests.bench.data_directories import filling, volumes
from tests.bench.harness import measured, python, sampled, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from txmq.core.topics.topics import CreateTopic

BODIES = [bytes([n]) * 1_024 for n in range(100)]
CLIENTS = "tests.bench.clients"
MIB = 1 << 20
UNDER_LOAD = 128 * MIB  # of the log a client sends, until the broker is killed
PARTITIONS = 4
READY_WITHIN_S = 300.0
IDLE_S = 30.0


def fill(address: str, size: int) -> None:
    """Send batches of 100 messages until the log has grown by about `size` bytes."""
    with txmq.connect(address, timeout=60) as client:
        for _ in range(size // sum(map(len, BODIES))):
            client.send_many("bench", BODIES)


@benchmark("store.start", "start-up after SIGKILL")
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
            filler.submit([CreateTopic("bench", PARTITIONS)])
            filler.submit(volumes(full - UNDER_LOAD, "bench", PARTITIONS), at_once=4)
        with serving(argv, READY_WITHIN_S) as program:
            fill(program.address, min(full, UNDER_LOAD))
            program.kill()
        with serving(argv, READY_WITHIN_S) as program:
            cpu = cpu_s(program.process.pid)
            what = f"start-up after SIGKILL under load, {full / 2**30:.2g} GiB of log"
            yield row("store.start_killed", what, "s", program.ready_after_s, goal=at_most(2.0))
            yield row("store.start_cpu", f"CPU time of the broker, {what}", "s", cpu)
            yield row(
                "store.start_rss",
                f"RssAnon after {what}",
                "MiB",
                program.rss_anon() / MIB,
            )


@benchmark("store.rss", "anonymous memory of the broker, and its CPU without work")
def memory(run: Run) -> Iterator[Row]:
    with broker(run) as program:
        time.sleep(1)  # until the work after the start is done
        yield row("store.rss_idle", "RssAnon, idle", "MiB", program.rss_anon() / MIB)
        before, idle_s = cpu_s(program.process.pid), run.seconds(IDLE_S)
        time.sleep(idle_s)
        cpu = (cpu_s(program.process.pid) - before) / idle_s * 60
        yield row("store.rss_idle_cpu", "CPU a minute, idle", "s", cpu, goal=at_most(0.5))
        with sampled(program.rss_anon) as samples:
            measured(python(f"{CLIENTS}.send_async", program.address, run.count(200_000), 10_000))
        yield row(
            "store.rss_load",
            "largest RssAnon, 10,000 sends of 1 KiB outstanding",
            "MiB",
            max(samples) / MIB,
        )
        with sampled(program.rss_anon) as samples:
            measured(python(f"{CLIENTS}.send_many", program.address, run.seconds(4), 1_024, 0))
        yield row(
            "store.rss_volumes",
            "largest RssAnon, columns of 1 KiB messages",
            "MiB",
            max(samples) / MIB,
        )
