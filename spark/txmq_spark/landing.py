"""Topics as Parquet files, partitioned by topic and date, each message once.

The progress of the stream and Spark's list of the files of each batch make it once: a
batch that is run again replaces the files of its first run. Whoever reads the directory
with Spark sees that list (`_spark_metadata`); others also see files of runs that died.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.query_errors import job_errors
from txmq_spark.session.query_run import clear_unplanned, last_batch, run_query
from txmq_spark.source.stream_progress import parse_progress

DATE_COLUMNS: Final = ("stored_at", "born_at")
KEPT_PROGRESS: Final = "spark.sql.streaming.numRecentProgressUpdates"
LANDING_ID: Final = "_txmq_landing"  # a file that readers of Parquet files take no notice of
LARGEST_ID: Final = 100
BATCHES: Final = 10_000  # whose messages are counted, at most


class LandOptions(NamedTuple):
    """Options of a landing: topics by name or by a pattern, and where to.

    `every_s` None = land what is there, and end. `max_messages` None = no limit.
    """

    url: str
    path: str
    checkpoint: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    date_from: str = DATE_COLUMNS[0]
    every_s: int | None = None
    max_messages: int | None = None
    fail_on_data_loss: bool = True


class Landed(NamedTuple):
    """The messages of this run, and those that had to be skipped since the first."""

    messages: int
    skipped: int


def land(spark: SparkSession, options: LandOptions) -> Landed:
    """Land topics until there is nothing more, or until the query is stopped.

    Raises ConfigError, QueryFailed.
    """
    rows = _rows(spark, options)
    with job_errors():
        require_same_batches(spark, options)
        clear_unplanned(spark, options.checkpoint)
    spark.conf.set(KEPT_PROGRESS, BATCHES)
    writer = rows.writeStream.format("parquet").partitionBy("topic", "date")
    writer = writer.option("path", options.path).option("checkpointLocation", options.checkpoint)
    query = run_query(writer, options.every_s)
    return _landed([json.loads(progress.json) for progress in query.recentProgress])


def require_same_batches(spark: SparkSession, options: LandOptions) -> None:
    """Raise ConfigError where the directory has the files of another checkpoint.

    Spark knows the batches of a directory by their numbers only. It would take those of
    the other checkpoint for batches that this one has landed, and skip their messages.
    """
    # Of one checkpoint these numbers rise in this order, also while another run is at
    # work. A run that was killed may have landed the batch that it had planned.
    committed = last_batch(spark, f"{options.checkpoint}/commits")
    landed = last_batch(spark, f"{options.path}/_spark_metadata")
    planned = last_batch(spark, f"{options.checkpoint}/offsets")
    if not committed <= landed <= planned or not _have_same_id(spark, options):
        raise ConfigError(
            "--path",
            f"{options.path} was not landed with the checkpoint {options.checkpoint}",
            hint="name its checkpoint (--checkpoint), or a new directory",
        )


def _have_same_id(spark: SparkSession, options: LandOptions) -> bool:
    """Return whether directory and checkpoint belong together; give an id to new ones.

    Another checkpoint may have as many batches.
    """
    directory, checkpoint = Directory(spark, options.path), Directory(spark, options.checkpoint)
    known, own = directory.read(LANDING_ID, LARGEST_ID), checkpoint.read(LANDING_ID, LARGEST_ID)
    if known is not None:
        return known == own
    # The checkpoint's comes first: a run that dies between the two can be repeated. A
    # run that begins at the same time may give the checkpoint another one between any
    # two steps.
    while known is None or known != own:
        if own is None:
            checkpoint.write(LANDING_ID, uuid4().hex)
        else:
            directory.write(LANDING_ID, own)
            known = own
        own = checkpoint.read(LANDING_ID, LARGEST_ID)
    return directory.read(LANDING_ID, LARGEST_ID) == own  # that of another checkpoint may be later


def _rows(spark: SparkSession, options: LandOptions) -> DataFrame:
    if bool(options.topics) == (options.pattern is not None):
        raise ConfigError(
            "--topic", "either topics or a pattern must be given", hint="--topic orders"
        )
    source = {"url": options.url, "failOnDataLoss": str(options.fail_on_data_loss).lower()}
    if options.pattern is None:
        source["topic"] = ",".join(options.topics)
    else:
        source["topicPattern"] = options.pattern
    if options.max_messages is not None:
        source["maxOffsetsPerTrigger"] = str(options.max_messages)
    rows = spark.readStream.format("txmq").options(**source).load()
    in_utc = f.to_utc_timestamp(f.col(options.date_from), f.current_timezone())
    return rows.withColumn("date", f.to_date(in_utc))


def _landed(batches: list[Mapping[str, Any]]) -> Landed:
    """Sum up the progress of a query's last batches."""
    messages = sum(int(batch["numInputRows"]) for batch in batches)
    ends = [source["endOffset"] for batch in batches[-1:] for source in batch["sources"]]
    skipped = (one.skipped for end in ends for one in parse_progress(end))
    return Landed(messages, sum(sum(counts.values()) for counts in skipped))
