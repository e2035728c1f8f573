r"""The data source `txmq`: topics and dead letters as DataFrames, DataFrames as
messages.

    spark.dataSource.register(TxmqDataSource)
    spark.read.format("txmq").option("url", url).option("topic", "orders").load()
    spark.read.format("txmq").option("url", url).option("letters", "billing").load()
    frame.write.format("txmq").option("url", url).option("topic", "orders") \
        .mode("append").save()

`topic` reads messages, `letters` the dead letters of a consumer group. The set of
messages is fixed when an action is planned: up to the published ends of that moment, or
up to the offsets of an option. Offsets are JSON, {"orders": {"0": 23}}. A partition
that is left out is read from its first message to its published end. A schema given
with `.schema(...)` chooses columns; the others are not decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from txmq.errors import ConfigError
from txmq_spark.arrow_letters import LETTERS, letter_batches, task_ranges
from txmq_spark.arrow_messages import MESSAGES, OffsetRange, record_batches
from txmq_spark.broker_link import BrokerLink
from txmq_spark.source_options import (
    ReadOptions,
    parse_read_options,
    parse_write_options,
    plan_ranges,
)
from txmq_spark.writing import JobWriter

MESSAGE_TYPES: Final = from_arrow_schema(MESSAGES)
LETTER_TYPES: Final = from_arrow_schema(LETTERS)


class TxmqDataSource(DataSource):
    """The data source; register it once per session.

    Its options are explained in the module's documentation: url; topic (several with
    commas) or letters; and others.
    """

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> StructType:
        return _types(parse_read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_read_options(self.options)
        names = _chosen(schema, _types(options))
        return (
            MessageReader(options, names)
            if options.letters is None
            else LetterReader(options, names)
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  # Spark's signature
        return JobWriter.for_schema(parse_write_options(self.options), schema, overwrite=overwrite)


class TaskRange(InputPartition):
    """The offsets of a partition that one task reads."""

    def __init__(self, offsets: OffsetRange) -> None:
        super().__init__(offsets)


class MessageReader(DataSourceReader):
    """Reader of topics, made by the driver and used in its tasks."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names

    def partitions(self) -> Sequence[InputPartition]:
        with BrokerLink(self._options.url) as link:
            bounds = {topic: link.offset_bounds(topic) for topic in self._options.topics}
        firsts, ends = ({topic: found[side] for topic, found in bounds.items()} for side in (0, 1))
        return [TaskRange(offsets) for offsets in plan_ranges(self._options, ends, firsts)] or [
            TaskRange(EMPTY_RANGE)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        offsets: OffsetRange = partition.value
        if offsets.start == offsets.end:
            return
        with BrokerLink(self._options.url) as link:
            yield from record_batches(link.chunks(offsets), offsets, self._names)


# Spark would take an empty list for a source without partitions.
EMPTY_RANGE: Final = OffsetRange("", 0, 0, 0)


class LetterReader(DataSourceReader):
    """Reader of the open letters of a consumer group.

    It reads letters that existed at planning and are still open.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names
        self._group = options.letters or ""

    def partitions(self) -> Sequence[InputPartition]:
        with BrokerLink(self._options.url) as link:
            numbers = [letter["number"] for letter in link.letters(self._group, bodies=False)]
        return [
            InputPartition(between)
            for between in task_ranges(numbers, self._options.min_partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        after, last = partition.value
        with BrokerLink(self._options.url) as link:
            found = link.letters(self._group, bodies="body" in self._names, after=after, last=last)
            yield from letter_batches(found, self._names)


def _types(options: ReadOptions) -> StructType:
    return MESSAGE_TYPES if options.letters is None else LETTER_TYPES


def _chosen(schema: StructType, known: StructType) -> list[str]:
    """Return the names of the requested columns.

    Raises ConfigError for a column that does not exist or has another type.
    """
    types: Mapping[str, Any] = {field.name: field.dataType for field in known}
    for field in schema:
        if types.get(field.name) != field.dataType:
            there = ", ".join(f"{name} {kind.simpleString()}" for name, kind in types.items())
            raise ConfigError(
                "schema",
                f"there is no column {field.name} {field.dataType.simpleString()}",
                hint=there,
            )
    return schema.names
