"""The data source `txmq`: topics and dead letters as DataFrames, and DataFrames as
messages.

    spark.dataSource.register(TxmqDataSource)
    spark.read.format("txmq").option("url", url).option("topic", "orders").load()         messages
    spark.read.format("txmq").option("url", url).option("letters", "billing").load()      dead letters of a group
    frame.write.format("txmq").option("url", url).option("topic", "orders").mode("append").save()

What is read is fixed when an action is planned: up to the published ends of that
moment, or the offsets given. Offsets are JSON, {"orders": {"0": 23}}; a partition left
out is read from its first message to its published end. A schema given with
`.schema(...)` chooses columns: what is left out is not even decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from txmq.errors import ConfigError
from txmq_spark.columns import MESSAGES, Span, record_batches
from txmq_spark.letters import LETTERS, letter_batches, ranges
from txmq_spark.link import Link
from txmq_spark.options import Reading, reading, spans, writing
from txmq_spark.writing import JobWriter

MESSAGE_TYPES: Final = from_arrow_schema(MESSAGES)
LETTER_TYPES: Final = from_arrow_schema(LETTERS)


class TxmqDataSource(DataSource):
    """Register it once a session. Options: url; topic (several with commas) or letters;
    see the module.
    """

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> StructType:
        return _types(reading(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        wanted = reading(self.options)
        names = _chosen(schema, _types(wanted))
        return (
            MessageReader(wanted, names) if wanted.letters is None else LetterReader(wanted, names)
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # Spark's signature
        return JobWriter.planned(writing(self.options), schema, overwrite=overwrite)


class Piece(InputPartition):
    """Offsets of a partition, for one task."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)


class MessageReader(DataSourceReader):
    """Reads topics by offset. Made by the driver, used by its tasks."""

    def __init__(self, wanted: Reading, names: Sequence[str]) -> None:
        self._wanted, self._names = wanted, names

    def partitions(self) -> Sequence[InputPartition]:
        with Link(self._wanted.url) as link:
            bounds = {topic: link.bounds(topic) for topic in self._wanted.topics}
        firsts, ends = ({topic: found[side] for topic, found in bounds.items()} for side in (0, 1))
        return [Piece(span) for span in spans(self._wanted, ends, firsts)] or [Piece(NOTHING)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        span: Span = partition.value
        if span.start == span.end:
            return
        with Link(self._wanted.url) as link:
            yield from record_batches(link.chunks(span), span, self._names)


NOTHING: Final = Span(
    "", 0, 0, 0
)  # Spark takes an empty list for a source that has no partitions to tell of


class LetterReader(DataSourceReader):
    """Reads the open letters of a consumer group: those that were there at planning and
    still are.
    """

    def __init__(self, wanted: Reading, names: Sequence[str]) -> None:
        self._wanted, self._names = wanted, names
        self._group = wanted.letters or ""

    def partitions(self) -> Sequence[InputPartition]:
        with Link(self._wanted.url) as link:
            numbers = [letter["number"] for letter in link.letters(self._group, bodies=False)]
        return [
            InputPartition(between) for between in ranges(numbers, self._wanted.least_partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        after, last = partition.value
        with Link(self._wanted.url) as link:
            found = link.letters(self._group, bodies="body" in self._names, after=after, last=last)
            yield from letter_batches(found, self._names)


def _types(wanted: Reading) -> StructType:
    return MESSAGE_TYPES if wanted.letters is None else LETTER_TYPES


def _chosen(schema: StructType, known: StructType) -> list[str]:
    """The names of the columns asked for. Raises ConfigError for one that is not there,
    or of another type.
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
