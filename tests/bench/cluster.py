"""A flush to the partition of a shared log, beside a bare record to the same nodes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.bench.harness import BenchError, measured, python
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.kafka_nodes import JARS, kafka_nodes
from txmq.broker.cluster.kafka_topic import create

SIZES = {"300b": 300, "32k": 32 << 10}
ROUNDS = 5
OURS, BARE = "tests.bench.clients.kafka_flush", "tests.bench.raw.kafka_produce"


@benchmark("cluster.flush", "one record to three nodes of Kafka, and its report")
def flush(run: Run) -> Iterator[Row]:
    if not JARS.exists():
        raise BenchError("no jars of Kafka: run `python -m tests.kafka_nodes`")
    with kafka_nodes(run.directory / "kafka") as kafka:
        create(kafka.address, "bench")
        for name, size in SIZES.items():
            args = (kafka.address.servers, "bench", run.count(1_000), size)
            rounds = [[measured(python(one, *args)) for one in (OURS, BARE)] for _ in range(ROUNDS)]
            for figure, goal in (("p50", at_most(1.2)), ("p99", None)):
                ours, bare = (
                    median(one[f"{figure}_us"] for one in side)
                    for side in zip(*rounds, strict=True)
                )
                yield row(
                    f"cluster.flush.{name}_{figure}", f"{size} bytes, acks=all: {figure}", "µs",
                    ours, yardstick=bare, goal=goal,
                )  # fmt: skip
            cpu = median(ours["cpu_us"] for ours, _bare in rounds)
            what = f"{size} bytes, acks=all: CPU of the client"
            yield row(f"cluster.flush.{name}_cpu", what, "µs", cpu, goal=at_most(400))
