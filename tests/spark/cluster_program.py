"""A program for `spark-submit`: copies a topic twice, as a batch and as a stream, with
a straggler in each. Then it copies the topic by attempts that die (`dying_program`), in
another application, to which the packages are shipped.

    spark-submit cluster_program.py URL TOPIC DIRECTORY SHIPPED PACKAGES

The executors of the first application have txmq on their path, those of the second one
only PACKAGES. The program writes to `DIRECTORY/origins` where they import it from.
The first attempt of partition 0 waits until a speculative copy of it has made its rows,
in another order. `DIRECTORY/attempts` gets a line for each attempt: what, partition,
attempt, host. It is no module of a package: executors have it by value.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dying_program  # type: ignore[import-not-found]  # beside this program
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

import txmq_spark
from txmq_spark.session.query_run import run_query

COLUMNS = "body binary, key string"


def straggling(
    what: str, directory: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    copied = Path(directory, f"{what}-copied")

    def straggle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        partition, attempt = task.partitionId(), task.attemptNumber()
        with Path(directory, "attempts").open("a") as journal:
            journal.write(f"{what} {partition} {attempt}\n")
        for batch in batches:
            yield batch.take(pa.array(range(len(batch))[:: -1 if attempt else 1]))
        if attempt:
            copied.touch()
        while partition == 0 and not copied.exists():  # the caller ends one that hangs
            time.sleep(0.05)

    return straggle


def tell_origin(spark: SparkSession, directory: str) -> None:
    """Write down where executors import the package from."""

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from txmq_spark.source import data_source  # in the executor

        for batch in batches:
            yield pa.record_batch({"file": [data_source.__file__] * batch.num_rows})

    [one] = spark.range(1).mapInArrow(tell, "file string").collect()
    with Path(directory, "origins").open("a") as journal:
        journal.write(f"{one['file']}\n")


def session_with(shipped: str, packages: str) -> SparkSession:
    """Return the session of another application, as `--py-files` makes it."""
    settings: dict[str, bool | float | int | str | None] = {
        "spark.files": shipped,
        "spark.submit.pyFiles": shipped,
        "spark.executorEnv.PYTHONPATH": packages,
    }
    return SparkSession.builder.config(map=settings).getOrCreate()


def main(url: str, topic: str, directory: str, shipped: str, packages: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    txmq_spark.register(spark)
    source = {"url": url, "topic": topic, "columns": "body,key", "minPartitions": "2"}
    frame = spark.read.format("txmq").options(**source).load()
    writer = frame.mapInArrow(straggling("batch", directory), COLUMNS).write.format("txmq")
    writer = writer.option("url", url).option("topic", f"{topic}-batch")
    writer.option("idempotency_key", topic).mode("append").save()
    stream = spark.readStream.format("txmq").options(**source).load()
    rows = stream.mapInArrow(straggling("stream", directory), COLUMNS)
    query = rows.writeStream.format("txmq").option("url", url).option("topic", f"{topic}-stream")
    query = query.option("checkpointLocation", f"{directory}/checkpoint")
    run_query(query, None)
    tell_origin(spark, directory)
    spark.stop()
    spark = session_with(shipped, packages)
    tell_origin(spark, directory)
    cloudpickle.register_pickle_by_value(dying_program)  # type: ignore[no-untyped-call] # its own
    dying_program.copy(spark, url, topic, directory)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
