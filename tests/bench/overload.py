"""Producers that send more than the disk takes: decisions' latency, memory, and whether
anything is lost. The disk is made slow, so that the machine's own does not matter.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import txmq
from tests.bench.brokers import command
from tests.bench.harness import ROOT, python, sampled, serving
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.bench.scale import directory

FIXED_MS, MIB_PER_S = 20, 16
OVERLOAD_S, ALONE_S = 600.0, 30.0
PRODUCERS = 2  # each has as much under way as the disk takes in two seconds
EVERY_S = 0.05  # between decisions
MAX_RSS_MIB = 300.0
CLIENTS = "tests.bench.clients"
TOPIC = "flood"


@dataclass(slots=True)
class Flood:
    """Producers, and in the end what became of their messages."""

    acked: int = 0
    failed: int = 0


@contextmanager
def flooding(url: str, producers: int = PRODUCERS) -> Iterator[Flood]:
    """Send from several processes for the block."""
    found, processes = Flood(), list[subprocess.Popen[bytes]]()
    try:
        for _ in range(producers):
            argv = python(f"{CLIENTS}.flood", url, TOPIC)
            processes.append(
                subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        for process in processes:
            _lines(process).readline()
        yield found
        for process in processes:
            out, _ = process.communicate(timeout=120.0)
            told = json.loads(out.splitlines()[-1])
            found.acked += told["acked"]
            found.failed += told["failed"]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _lines(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None, "it is a pipe"
    return process.stdout


def halves(client: txmq.Client, count: int) -> list[Any]:
    """Store half messages that nobody checks for a day."""
    futures = [
        client.half_async("halves", b"m", checker="bench", check_after=86_400.0)
        for _ in range(count)
    ]
    return [future.result() for future in futures]


def decided(some: list[Any], every_s: float = EVERY_S) -> list[float]:
    """Commit one half after the other; return the milliseconds that each took."""
    took: list[float] = []
    for half in some:
        began = time.perf_counter()
        assert half.commit().result()
        took.append((time.perf_counter() - began) * 1e3)
        time.sleep(every_s)
    return sorted(took)


def stored(client: txmq.Client) -> int:
    """Return how many messages of the flood are there."""
    topics = client.call("topic.list")["topics"]
    return next(int(one["messages"]) for one in topics if one["name"] == TOPIC)


def p99(took: list[float]) -> float:
    """Return the 99th percentile of sorted times."""
    return took[len(took) * 99 // 100]


@benchmark("store.overload", "sends at more than the disk takes")
def overload(run: Run) -> Iterator[Row]:
    with directory(run) as place:
        module, *argv = command(place)[2:]
        assert module == "txmq", "the command of a broker"
        slow = python("tests.system.slow_disk_broker", FIXED_MS, MIB_PER_S, *argv)
        with serving(slow, 120.0) as broker, txmq.connect(broker.address, service="b") as client:
            alone = decided(halves(client, round(run.seconds(ALONE_S) / EVERY_S)))
            prepared = halves(client, round(run.seconds(OVERLOAD_S) / (EVERY_S + FIXED_MS / 1e3)))
            with sampled(broker.rss_anon) as memory, flooding(broker.address) as flood:
                loaded = decided(prepared)
                shown = client.call("broker.show")["throttled"]
            there = stored(client)
    yield row("store.overload.alone.p99", "decisions, p99, with nobody else", "ms", p99(alone))
    yield row("store.overload.p99", "decisions, p99, under overload", "ms", p99(loaded),
              yardstick=p99(alone), goal=at_most(3))  # fmt: skip
    yield row("store.overload.max", "the longest decision", "ms", loaded[-1])
    yield row("store.overload.waited", "sends that waited for the disk", "requests",
              float(shown["waited"]))  # fmt: skip
    yield row("store.overload.sent", "messages of 8 KiB with a receipt", "messages",
              float(flood.acked))  # fmt: skip
    yield row("store.overload.lost", "messages with a receipt that are not there", "messages",
              float(max(0, flood.acked - there)), goal=at_most(0))  # fmt: skip
    yield row("store.overload.failed", "sends without a receipt", "messages",
              float(flood.failed), goal=at_most(0))  # fmt: skip
    yield row("store.overload.rss", "RssAnon, peak", "MiB", max(memory) / (1 << 20),
              goal=at_most(MAX_RSS_MIB))  # fmt: skip
