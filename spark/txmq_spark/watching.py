"""A query that watches the dead letters of groups, beside the log if that is wanted,
and sends alerts to a topic and to PostgreSQL.

The progress, the memory of each group and the alerts of a batch belong together: a
batch that is run again makes the same alerts, and sends them once. Old letters are no
news of a stream: they are asked for between its batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from txmq.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable, UnknownGroup
from txmq.model.units import SECOND
from txmq_spark.alerts.sinks import AlertSinks, AlertTable
from txmq_spark.alerts.watch_rules import Alert, DeadLetter, GroupMemory, WatchRules, old_letters
from txmq_spark.landing import LANDING_ID, LARGEST_ID
from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.query_errors import job_errors
from txmq_spark.session.query_run import clear_unplanned, run_query
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.logs import Logs, ask_of_group
from txmq_spark.source.options import ReadOptions
from txmq_spark.source.writing import QUERY_PROPERTY, QueryBatch, batch_job_name

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.state import GroupState

ALERTS: Final = "kind string, fields string"
MEMORY: Final = "text string"
NUMBERS: Final = {
    "dead_at": LongType(),
    "offset": LongType(),
    "parked": LongType(),
} | dict.fromkeys(("partition", "replays", "deaths"), IntegerType())
# A letter of a group, or the number of messages in a window, which `dead_at` begins.
NEWS: Final = StructType(
    [
        StructField("group", StringType()),
        *(StructField(name, NUMBERS.get(name, StringType())) for name in DeadLetter._fields),
        StructField("messages", LongType()),
    ]
)
_ARROW_NEWS: Final = to_arrow_schema(NEWS)
Batches = Iterator[pa.RecordBatch]
Judge = Callable[[Any, "Iterable[pd.DataFrame]", "GroupState"], "Iterator[pd.DataFrame]"]
# Alerts of a batch depend on its letters, and so does the time that a batch takes.
BATCH_LETTERS: Final = 100_000
BATCH_MESSAGES: Final = 1_000_000
log = structlog.get_logger()


class WatchOptions(NamedTuple):
    """Options of a watch. `every_s` None = judge what is there, and end."""

    url: str
    groups: tuple[str, ...]
    topic: str
    checkpoint: str
    every_s: int | None = None
    from_now: bool = False
    rules: WatchRules = WatchRules()
    table: AlertTable | None = None


def watch(spark: SparkSession, options: WatchOptions) -> None:
    """Send alerts until there are no more letters, or until the query is stopped.

    Raises QueryFailed, DatabaseError, UnknownGroup.
    """
    sinks = AlertSinks(options.url, options.topic, options.table)
    if sinks.table is not None:
        sinks.table.prepare()
    with job_errors():
        _require_no_landing(spark, options.checkpoint)
        clear_unplanned(spark, options.checkpoint)
    writer = alerts(spark, options).writeStream.foreachBatch(batch_sink(sinks))
    writer = writer.option("checkpointLocation", options.checkpoint)
    ages = AgeWatch(options, sinks)
    run_query(writer, options.every_s, ages.tell)


def _require_no_landing(spark: SparkSession, checkpoint: str) -> None:
    """Raise ConfigError for the checkpoint of a landing: a batch that is planned there
    is not one that the landing could do.
    """
    if Directory(spark, checkpoint).read(LANDING_ID, LARGEST_ID) is not None:
        raise ConfigError(
            "--checkpoint",
            f"{checkpoint} is that of a landed directory",
            hint="name a directory for the progress of this watch alone",
        )


def alerts(spark: SparkSession, options: WatchOptions) -> DataFrame:
    """Return the alerts of a stream of letters: a kind, and fields as JSON."""
    news = _letters(spark, options)
    if options.rules.share:
        news = news.unionByName(_messages(spark, options))
    return news.groupBy("group").applyInPandasWithState(
        group_judge(options.rules), ALERTS, MEMORY, "append", "NoTimeout"
    )


def _letters(spark: SparkSession, options: WatchOptions) -> DataFrame:
    source = {
        "url": options.url,
        "letters": ",".join(options.groups),
        "columns": ",".join(("group", *DeadLetter._fields)),
        "maxOffsetsPerTrigger": str(BATCH_LETTERS),
        "startingOffsets": "latest" if options.from_now else "earliest",
    }
    letters = spark.readStream.format("txmq").options(**source).load()
    letters = letters.withColumn("dead_at", f.unix_micros("dead_at")).na.fill("", ["key"])
    return letters.withColumn("messages", f.lit(0).cast("long")).select(NEWS.names)


def _messages(spark: SparkSession, options: WatchOptions) -> DataFrame:
    """Return the numbers of messages by group and window, for each task's part of the
    log.
    """
    groups = groups_of_topics(options.url, options.groups)
    if not groups:
        raise ConfigError(
            "share",
            f"{', '.join(options.groups)} consume no topic yet",
            hint="start the consumers first, or leave --share out",
        )
    source = {
        "url": options.url,
        "topic": ",".join(sorted(groups)),
        "columns": "topic,stored_at",
        "maxOffsetsPerTrigger": str(BATCH_MESSAGES),
        "startingOffsets": "latest" if options.from_now else "earliest",
        "failOnDataLoss": "false",  # a count may go on without what retention has removed
    }
    messages = spark.readStream.format("txmq").options(**source).load()
    return messages.mapInArrow(message_counter(groups, options.rules), NEWS)


def groups_of_topics(url: str, groups: Iterable[str]) -> dict[str, list[str]]:
    """Return the groups by the topics that they consume. Raises UnknownGroup for one
    that no log has.
    """
    found: dict[str, list[str]] = {}
    with Logs(ReadOptions(url)) as logs:
        places = logs.places()
        for group in groups:
            shown = ask_of_group(places, methodcaller("call", "group.show", group=group))
            for topic in sorted({topic for _place, one in shown for topic in one["topics"]}):
                found.setdefault(topic, []).append(group)
    return found


def message_counter(
    groups: Mapping[str, list[str]], rules: WatchRules
) -> Callable[[Batches], Batches]:
    """Return the function by which tasks count the messages of a log."""

    def count(batches: Batches) -> Batches:
        for batch in batches:
            times = pc.cast(batch.column("stored_at"), pa.int64())
            windows = pc.multiply(pc.divide(times, rules.window), rules.window)
            table = pa.table({"topic": batch.column("topic"), "window": windows})
            counted = table.group_by(["topic", "window"]).aggregate([([], "count_all")])
            rows = [
                {"group": group, "dead_at": row["window"], "messages": row["count_all"]}
                for row in counted.to_pylist()
                for group in groups.get(row["topic"], ())
            ]
            yield pa.RecordBatch.from_pylist(rows, _ARROW_NEWS)

    return count


def group_judge(rules: WatchRules) -> Judge:
    """Return the function by which Spark judges the letters of a group in a batch."""

    def judge_group(
        key: Any,  # noqa: ANN401  # a tuple, which Spark does not type
        frames: Iterable[pd.DataFrame],
        state: GroupState,
    ) -> Iterator[pd.DataFrame]:
        import pandas as pd  # noqa: PLC0415  # in the executor

        (group,) = key
        memory = GroupMemory(group, state.get[0] if state.exists else None)
        letters: list[DeadLetter] = []
        messages: dict[int, int] = {}
        for frame in frames:
            of_log = frame[frame["messages"] > 0]
            for begun, count in zip(of_log["dead_at"], of_log["messages"], strict=True):
                messages[int(begun)] = messages.get(int(begun), 0) + int(count)
            rows = frame[frame["messages"] == 0][list(DeadLetter._fields)]
            letters += (_letter(row) for row in rows.itertuples(index=False, name=None))
        found = memory.judge(letters, rules, messages)
        state.update((memory.to_text(),))
        if found:
            fields = [one.to_fields() for one in found]
            yield pd.DataFrame({"kind": [one.kind for one in found], "fields": fields})

    return judge_group


def _letter(row: Iterable[Any]) -> DeadLetter:
    """Return a letter of a row. Beside rows of the log its numbers may be floats."""
    values = zip(DeadLetter._fields, row, strict=True)
    return DeadLetter._make(int(value) if name in NUMBERS else value for name, value in values)


def batch_sink(sinks: AlertSinks) -> Callable[[DataFrame, int], None]:
    """Return the function that sends the alerts of a batch, in the driver."""

    def send(frame: DataFrame, batch: int) -> None:
        query = frame.sparkSession.sparkContext.getLocalProperty(QUERY_PROPERTY)
        assert query is not None, "Spark sets it for the thread that runs a query"
        found = frame.toArrow().to_pylist()
        name = batch_job_name(QueryBatch(query, batch))
        sinks.send(name, [Alert.of(row["kind"], row["fields"]) for row in found])

    return send


class AgeWatch:
    """Alerts about the oldest open letter of each group, if it is too old."""

    def __init__(self, options: WatchOptions, sinks: AlertSinks) -> None:
        self._options, self._sinks = options, sinks
        self._told: dict[tuple[str, str], str] = {}  # by group and log

    def tell(self, query: StreamingQuery) -> None:
        """Send the alerts of now, each once for a checkpoint, and what was left.

        While the broker or the database is away there are none: a later time will do.
        """
        try:
            self._sinks.resume(str(query.id))
        except (BrokerUnavailable, DatabaseUnavailable) as error:
            log.warning("spark.alerts_untold", error=str(error))
        for group in self._options.groups:
            try:
                for log_id, alert in self._old(group):
                    name = alert.fields["id"]
                    if self._told.get((group, log_id)) != name:
                        self._sinks.send(f"alert {query.id} {name}", [alert])
                    self._told[group, log_id] = name
            except (BrokerUnavailable, DatabaseUnavailable, UnknownGroup) as error:
                log.warning("spark.ages_untold", group=group, error=str(error))

    def _old(self, group: str) -> list[tuple[str, Alert]]:
        """Return the alert about the group in each log that has one, by the log's id.

        Raises UnknownGroup where no log has the group.
        """
        rules = self._options.rules
        select = {"died_before": max(0, int(time.time() * SECOND) - rules.age)}

        def old(link: BrokerLink) -> list[Alert]:
            listed = link.call("dlq.list", group=group, select=select, limit=1)
            return old_letters(group, listed["letters"], rules)

        with Logs(ReadOptions(self._options.url, letters=(group,))) as logs:
            found = ask_of_group(logs.places(), old)
            return [(place.link.log_id, one) for place, alerts in found for one in alerts]
