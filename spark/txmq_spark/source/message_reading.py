"""Topics as a DataFrame, once: a set of messages that is fixed at planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from txmq_spark.source.arrow_messages import OffsetRange, record_batches
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.logs import (
    Logs,
    LogTask,
    Look,
    require_one_log,
    survey_all,
    with_log,
)
from txmq_spark.source.offset_ranges import Survey, TaskRange, batch_ranges, cut_ranges
from txmq_spark.source.options import ReadOptions
from txmq_spark.source.pushed_filters import ALL, PushedMessages, push_message_filters


class MessageReader(DataSourceReader):
    """Reader of topics, made by the driver and used in its tasks."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names
        self._pushed = PushedMessages()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with Logs(options) as logs:
            places = logs.places()
            require_one_log(places, {**options.start.given, **options.end.given})
            surveys = survey_all(places, message_look(options), options.topics)
            least = -(-options.min_partitions // len(surveys))
            tasks = [
                LogTask(place.link.url, survey.log.log_id, task)
                for place, survey in surveys
                for task in cut_ranges(
                    self._ranges(place.link, survey), survey, options._replace(min_partitions=least)
                )
            ]
        # Spark would take an empty list for a source without partitions.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task: LogTask | None = partition.value
        if task is not None:
            read = partial(read_task, task.of(self._options), task.work)
            yield from with_log(read, self._names, task.log_id)

    def _ranges(self, link: BrokerLink, survey: Survey) -> list[OffsetRange]:
        """Return what is read of one log."""
        ranges = self._pushed.apply(batch_ranges(self._options, survey, link.offset_at))
        if self._pushed.stored == ALL:
            return list(ranges)
        return [self._within_times(link, survey, one) for one in ranges]

    def _within_times(self, link: BrokerLink, survey: Survey, offsets: OffsetRange) -> OffsetRange:
        """Cut a range by the times of storage that a filter leaves."""
        topic, partition, start, end = offsets
        bounds, stored = survey.topics[topic], self._pushed.stored
        first, published = bounds.firsts[partition], bounds.ends[partition]
        if stored.start > ALL.start:
            start = max(start, link.offset_at(topic, partition, first, published, stored.start))
        if stored.end < ALL.end:
            end = min(end, link.offset_at(topic, partition, first, published, stored.end))
        return offsets._replace(start=start, end=end)


class FilteringMessageReader(MessageReader):
    """Reader of topics that takes filters from Spark."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        self._pushed, rest = push_message_filters(filters)
        return rest


def message_look(options: ReadOptions) -> Look:
    """Return the function that surveys the topics of a read."""
    return lambda link, missing: link.survey(options, missing=missing)


def read_task(
    options: ReadOptions, task: TaskRange, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task. Raises DataLoss, LogChanged, TopicReplaced."""
    with BrokerLink(options.url) as link:
        chunks = link.range_chunks(task, fail=options.fail_on_data_loss)
        yield from record_batches(chunks, task.offsets, names)
