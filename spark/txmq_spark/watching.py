"""A query that watches the dead letters of groups, and sends alerts to a topic.

The letters' progress, the memory of each group and the alerts of a batch belong
together: a batch that is run again makes the same alerts, and sends them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq_spark.query_run import run_query
from txmq_spark.watch_rules import DeadLetter, GroupMemory, WatchRules

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.state import GroupState

ALERTS: Final = "body binary, key string, tag string"
MEMORY: Final = "text string"
# Alerts of a batch depend on its letters, and so does the time that a batch takes.
BATCH_LETTERS: Final = 100_000


class WatchOptions(NamedTuple):
    """Options of a watch. `every_s` None = judge what is there, and end."""

    url: str
    groups: tuple[str, ...]
    topic: str
    checkpoint: str
    every_s: int | None = None
    from_now: bool = False
    rules: WatchRules = WatchRules()


def watch(spark: SparkSession, options: WatchOptions) -> None:
    """Send alerts until there are no more letters, or until the query is stopped.

    Raises QueryFailed.
    """
    writer = alerts(spark, options).writeStream.format("txmq")
    writer = writer.option("url", options.url).option("topic", options.topic)
    writer = writer.option("checkpointLocation", options.checkpoint)
    run_query(writer, options.every_s)


def alerts(spark: SparkSession, options: WatchOptions) -> DataFrame:
    """Return the alerts of a stream of letters, as messages for a topic."""
    source = {
        "url": options.url,
        "letters": ",".join(options.groups),
        "columns": ",".join(("group", *DeadLetter._fields)),
        "maxOffsetsPerTrigger": str(BATCH_LETTERS),
        "startingOffsets": "latest" if options.from_now else "earliest",
    }
    letters = spark.readStream.format("txmq").options(**source).load()
    letters = letters.withColumn("dead_at", f.unix_micros("dead_at"))
    return letters.groupBy("group").applyInPandasWithState(
        judge(options.rules), ALERTS, MEMORY, "append", "NoTimeout"
    )


Judge = Callable[[Any, "Iterable[pd.DataFrame]", "GroupState"], "Iterator[pd.DataFrame]"]


def judge(rules: WatchRules) -> Judge:
    """Return the function by which Spark judges the letters of a group in a batch."""

    def judge_group(
        key: Any,  # noqa: ANN401  # a tuple, which Spark does not type
        frames: Iterable[pd.DataFrame],
        state: GroupState,
    ) -> Iterator[pd.DataFrame]:
        import pandas as pd  # noqa: PLC0415  # in the executor

        (group,) = key
        memory = GroupMemory(group, state.get[0] if state.exists else None)
        rows = (
            row
            for frame in frames
            for row in frame[list(DeadLetter._fields)].itertuples(index=False, name=None)
        )
        found = memory.judge(map(DeadLetter._make, rows), rules)
        state.update((memory.to_text(),))
        if found:
            bodies = [alert.to_json() for alert in found]
            yield pd.DataFrame({"body": bodies, "key": group, "tag": [one.kind for one in found]})

    return judge_group
