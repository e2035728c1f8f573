"""The cost of many topics, and of many undecided transactions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.brokers import command, cpu_s
from tests.bench.data_directories import filling, halves, topics
from tests.bench.harness import Program, measured, python, serving
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.bench.startup import CLIENTS, MIB, READY_WITHIN_S

TOPICS = (1, 1_000, 10_000)
PARTITIONS = 4

MANY_TOPICS, HALVES = 100_000, 1_000_000


@contextmanager
def directory(run: Run) -> Iterator[Path]:
    """Yield an empty directory, which is removed at the end."""
    made = Path(tempfile.mkdtemp(dir=run.directory))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@benchmark("store.topics", "sends to one of very many topics")
def sends_to_many(run: Run) -> Iterator[Row]:
    found = {count: _sent(run, count) for count in TOPICS}
    for name, what in (
        ("single", "1 KiB, fsync, 64 outstanding"),
        ("batch", "batches of 100 × 1 KiB, fsync"),
    ):
        for count in TOPICS[1:]:
            yield row(
                f"store.topics.{name}_{count}",
                f"{what}, a random topic of {count:,} with {PARTITIONS} partitions, beside one",
                "messages/s",
                found[count][f"{name}_per_s"],
                yardstick=found[1][f"{name}_per_s"],
                goal=at_least(0.9),
            )
            cpu = f"CPU time of broker and client per message, beside one: {what}, {count:,} topics"
            yield row(
                f"store.topics.{name}_{count}_cpu",
                cpu,
                "µs",
                found[count][f"{name}_cpu_us"],
                yardstick=found[1][f"{name}_cpu_us"],
            )


def _sent(run: Run, count: int) -> dict[str, Any]:
    """Return rates and CPU times of sends to `count` topics."""
    with directory(run) as place:
        with filling(place / "data") as filler:
            filler.submit(topics(count, PARTITIONS))
        found = dict[str, Any]()
        with serving(command(place), READY_WITHIN_S) as program:
            for name, full, batch in (("single", 40_000, 1), ("batch", 400_000, 100)):
                result = _measure(program, count, run.count(full), batch)
                found |= {f"{name}_per_s": result["per_s"], f"{name}_cpu_us": result["cpu_us"]}
    return found


def _measure(program: Program, count: int, messages: int, batch: int) -> dict[str, Any]:
    argv = python(
        f"{CLIENTS}.many_topics", program.address, count, messages, batch, program.process.pid
    )
    return measured(argv)


@benchmark("store.many_topics", "start-up and memory with 100,000 topics")
def start_with_topics(run: Run) -> Iterator[Row]:
    count = run.count(MANY_TOPICS)
    with directory(run) as place:
        with filling(place / "data") as filler:
            filler.submit(topics(count, 1))
        with serving(command(place), READY_WITHIN_S) as program:
            yield from _started(
                "store.many_topics", f"{count:,} topics", program, at_most(5.0), 400
            )


@benchmark("store.undecided", "start-up and memory with 1,000,000 undecided half messages")
def start_with_halves(run: Run) -> Iterator[Row]:
    count = run.count(HALVES)
    with directory(run) as place:
        with filling(place / "data") as filler:
            filler.submit(topics(1, 1))
            filler.submit(halves(count, "bench-0"))
        with serving(command(place), READY_WITHIN_S) as program:
            yield from _started(
                "store.undecided", f"{count:,} undecided halves", program, at_most(10.0), 250
            )


def _started(
    prefix: str, what: str, program: Program, within: Any, megabytes: int
) -> Iterator[Row]:
    yield row(f"{prefix}.start", f"start-up with {what}", "s", program.ready_after_s, goal=within)
    yield row(
        f"{prefix}.start_cpu",
        "CPU time of the broker for the same",
        "s",
        cpu_s(program.process.pid),
    )
    _measure(program, 1, 2_000, 1)  # until all timers have run
    limit = at_most(megabytes * 1e6 / MIB)
    yield row(f"{prefix}.rss", f"RssAnon with {what}", "MiB", program.rss_anon() / MIB, goal=limit)
