"""The producer's spool: the rate of sends without a broker, and of the drain."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from tests.bench.brokers import broker
from tests.bench.harness import in_turn, measured, python
from tests.bench.rows import Row, Run, at_least, benchmark, row
from tests.bench.yardsticks import RAW

CLIENTS = "tests.bench.clients"
OUTSTANDING = 64


def client(doing: str, *arguments: object) -> float:
    return float(measured(python(f"{CLIENTS}.spool", doing, *arguments))["per_s"])


@benchmark("recover.spool", "sends of 1 KiB to the spool, 64 outstanding")
def spool(run: Run) -> Iterator[Row]:
    count = run.count(100_000)

    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=run.directory) as directory:
            return client("store", directory, count, OUTSTANDING)

    def raw() -> float:
        with tempfile.NamedTemporaryFile(dir=run.directory) as file:
            took = measured(python(f"{RAW}.group_file", file.name, count, 1_024, OUTSTANDING))
            return float(took["per_s"])

    value, yardstick = in_turn(3, ours, raw)
    what = "1 KiB, on disk, 64 outstanding, beside a file with a sync for each 64"
    yield row("recover.spool", what, "msg/s", value, yardstick=yardstick, goal=at_least(0.7))


@benchmark("recover.drain", "drain of a full spool")
def drain(run: Run) -> Iterator[Row]:
    count = run.count(1_000_000)

    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=run.directory) as directory, broker(run) as program:
            return client("drain", directory, count, program.address)

    def direct() -> float:
        with broker(run) as program:
            return client("direct", count, program.address)

    value, yardstick = in_turn(3, ours, direct)
    what = f"drain of {count:,} messages of 100 B, beside pipelined sends"
    yield row("recover.drain", what, "msg/s", value, yardstick=yardstick, goal=at_least(0.9))
