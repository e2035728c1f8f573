"""Spark beside a broker, in a session on two cores.

    python -m tests.bench.clients.spark batch URL MESSAGES DIRECTORY
    python -m tests.bench.clients.spark stream URL SECONDS RATE TRIGGER_S DIRECTORY

`batch` prints {"txmq_mb_s", "parquet_mb_s", "write_per_s"}: the median of three reads
of the same messages in turn, and one write. `stream` prints {"delay_s"}: from the birth
of a batch's first message to the end of the batch; 99 % of the batches took no longer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING

import txmq
from tests.bench.harness import in_turn
from tests.bench.raw.latency import percentile
from txmq_spark.session.local_session import local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC, WRITTEN, PARTITIONS, AT_ONCE = "bench-spark", "bench-spark-write", 8, 10_000
BODY_BYTES, ROUNDS, MB = 1 << 10, 3, 1e6
WARM_UP = 10_000  # messages
SETTLE_S = 3.0  # the first batches warm the JVM up


def fill(client: txmq.Client, messages: int) -> None:
    """Send messages with bodies that do not compress."""
    chance = Random(1)
    client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
    for first in range(0, messages, AT_ONCE):
        bodies = [chance.randbytes(BODY_BYTES) for _ in range(min(AT_ONCE, messages - first))]
        client.send_many(TOPIC, bodies, partition=first // AT_ONCE % PARTITIONS)


def batch(url: str, messages: int, directory: str) -> dict[str, float]:
    with txmq.connect(url, timeout=60.0) as client, local_session("local[2]") as spark:
        fill(client, messages)
        load(spark, url).write.parquet(directory)
        client.call("topic.create", name=WRITTEN, partitions=PARTITIONS)
        seconds_to_write(spark, url, WARM_UP)  # the first one starts workers and compiles
        took = in_turn(
            ROUNDS,
            lambda: seconds_to_sum(load(spark, url)),
            lambda: seconds_to_sum(spark.read.parquet(directory)),
        )
        ours, parquet = (messages * BODY_BYTES / MB / one for one in took)
        return {
            "txmq_mb_s": ours,
            "parquet_mb_s": parquet,
            "write_per_s": messages / seconds_to_write(spark, url, messages),
        }


def load(spark: SparkSession, url: str) -> DataFrame:
    """Return the topic's bodies. Spark plans the read of a frame once, so load anew."""
    reader = spark.read.format("txmq").option("url", url).option("topic", TOPIC)
    return reader.option("columns", "body").load()


def seconds_to_sum(frame: DataFrame) -> float:
    began = time.perf_counter()
    frame.selectExpr("sum(length(body))").collect()
    return time.perf_counter() - began


def seconds_to_write(spark: SparkSession, url: str, messages: int) -> float:
    rows = spark.range(0, messages, 1, PARTITIONS).selectExpr(
        "CAST(repeat('x', 100) AS binary) body", f"concat('k', id % {messages // 10 + 1}) key"
    )
    began = time.perf_counter()
    writer = rows.write.format("txmq").option("url", url).option("topic", WRITTEN)
    writer.mode("append").save()
    return time.perf_counter() - began


def stream(
    url: str, seconds: float, per_second: int, trigger_s: int, directory: str
) -> dict[str, float]:
    from pyspark.sql import functions as f  # after the session's JVM is chosen

    with txmq.connect(url, timeout=60.0) as client, local_session("local[2]") as spark:
        client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", 1_000_000)
        reader = spark.readStream.format("txmq").option("url", url).option("topic", TOPIC)
        rows = reader.option("columns", "body,born_at").load()
        first = f.min(f.unix_micros("born_at"))
        writer = rows.observe("born", first.alias("first")).writeStream.format("noop")
        writer = writer.option("checkpointLocation", directory)
        query = writer.trigger(processingTime=f"{trigger_s} seconds").start()
        client.send_many(TOPIC, [bytes(100)] * WARM_UP)
        query.processAllAvailable()  # the first batch starts workers and compiles
        sender = threading.Thread(target=send, args=(client, seconds + SETTLE_S, per_second))
        began = time.time()
        sender.start()
        sender.join()
        query.processAllAvailable()
        query.stop()
        delays = []
        for progress in query.recentProgress:
            told = json.loads(progress.json)
            if not told["numInputRows"]:
                continue
            ended = datetime.fromisoformat(told["timestamp"]).timestamp()
            ended += told["durationMs"]["triggerExecution"] / 1e3
            if ended > began + SETTLE_S:
                delays.append(ended - told["observedMetrics"]["born"]["first"] / 1e6)
        return {"delay_s": percentile(delays, 99)}


def send(client: txmq.Client, seconds: float, per_second: int) -> None:
    """Send at an even pace, a hundredth of a second's messages at a time."""
    bodies, began = [bytes(100)] * max(1, per_second // 100), time.monotonic()
    for step in range(int(seconds * 100)):
        time.sleep(max(0.0, began + step / 100 - time.monotonic()))
        client.send_many(TOPIC, bodies, partition=step % PARTITIONS)


def main(what: str, url: str, *more: str) -> None:
    """Measure and print."""
    if what == "batch":
        print(json.dumps(batch(url, int(more[0]), more[1])))
    else:
        seconds, per_second, trigger_s, directory = more
        found = stream(url, float(seconds), int(per_second), int(trigger_s), directory)
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
