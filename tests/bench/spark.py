"""Spark: reads beside Parquet files, transactional writes, the delay of a stream."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.brokers import FLUSH_10_MS, broker
from tests.bench.harness import measured, python
from tests.bench.rows import Row, Run, at_least, at_most, benchmark, row

CLIENT = "tests.bench.clients.spark"
MESSAGES, WITHIN_S = 1_000_000, 3_600.0
STREAM_S, PER_SECOND, TRIGGER_S = 60.0, 20_000, 1


@benchmark("spark.batch", "batches on two cores: read with sum(length(body)), write in key order")
def batch(run: Run) -> Iterator[Row]:
    messages = run.count(MESSAGES)
    with broker(run, FLUSH_10_MS) as program:
        took = measured(
            python(CLIENT, "batch", program.address, messages, run.directory / "parquet"), WITHIN_S
        )
    of = f"{messages / 1e6:g} M messages of 1 KiB, uncompressed"
    yield row(
        "spark.batch_read",
        f"read of {of}, beside Parquet of the same",
        "MB/s",
        took["txmq_mb_s"],
        yardstick=took["parquet_mb_s"],
        goal=at_least(0.5),
    )
    yield row(
        "spark.batch_read_speed", f"read of {of}", "MB/s", took["txmq_mb_s"], goal=at_least(300)
    )
    yield row(
        "spark.batch_write",
        f"one job of {messages / 1e6:g} M messages of 100 B, in key order",
        "/s",
        took["write_per_s"],
        goal=at_least(100_000),
    )


@benchmark("spark.stream", "a stream at 20,000 messages a second")
def stream(run: Run) -> Iterator[Row]:
    with broker(run, FLUSH_10_MS) as program:
        took = measured(
            python(
                CLIENT,
                "stream",
                program.address,
                run.seconds(STREAM_S),
                PER_SECOND,
                TRIGGER_S,
                run.directory / "checkpoint",
            ),
            WITHIN_S,
        )
    yield row(
        "spark.stream_delay",
        f"from send to the end of its batch, {PER_SECOND} messages/s, a batch each"
        f" {TRIGGER_S} s: the worst of 99 % of the batches",
        "s",
        took["delay_s"],
        goal=at_most(TRIGGER_S + 1),
    )
