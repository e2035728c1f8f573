"""The consumer's local store: its rate, and what a full one costs at start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row
from tests.bench.startup import CLIENTS, MIB
from tests.bench.yardsticks import sink_per_s

OUTSTANDING, SMALL_STORE = 64, 10_000


def client(doing: str, *arguments: object) -> dict[str, float]:
    return measured(python(f"{CLIENTS}.local_store", doing, *arguments))


@benchmark("recover.store", "local store, 1 KiB, 64 outstanding")
def store(run: Run) -> Iterator[Row]:
    count = run.count(100_000)

    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=run.directory) as directory:
            return client("put", f"{directory}/s", count, OUTSTANDING)["per_s"]

    value, in_thread, inline = in_turn(
        3,
        ours,
        lambda: sink_per_s(run, OUTSTANDING, "thread", count=100_000),
        lambda: sink_per_s(run, OUTSTANDING, "inline", count=100_000),
    )
    what = "put of 1 KiB, on disk, 64 outstanding"
    yield row("recover.store", what, "msg/s", value, goal=at_least(20_000))
    yield row(
        "recover.store.sink",
        f"{what}, beside the raw sink",
        "msg/s",
        value,
        yardstick=max(in_thread, inline),
        goal=at_least(0.7),
    )


@benchmark("recover.startup", "start of a full local store")
def startup(run: Run) -> Iterator[Row]:
    full = run.count(1_000_000)
    found = {}
    for count in (SMALL_STORE, full):
        with tempfile.TemporaryDirectory(dir=run.directory) as directory:
            client("fill", f"{directory}/s", count)
            found[count] = client("open", f"{directory}/s")
    small, large = found[SMALL_STORE], found[full]
    what = f"with {full:,} messages, until the first are handed out"
    yield row("recover.startup", what, "s", large["seconds"], goal=at_most(2.0))
    yield row(
        "recover.startup.rss",
        f"RssAnon {what}, beside {SMALL_STORE:,} messages",
        "MiB",
        large["rss"] / MIB,
        yardstick=small["rss"] / MIB,
        goal=at_most(1.2),
    )
