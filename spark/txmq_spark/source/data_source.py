r"""The data source `txmq`: topics and dead letters as DataFrames, DataFrames as
messages.

    spark.dataSource.register(TxmqDataSource)
    spark.read.format("txmq").option("url", url).option("topic", "orders").load()
    spark.read.format("txmq").option("url", url).option("letters", "billing").load()
    spark.readStream.format("txmq").option("url", url).option("topic", "orders").load()
    frame.write.format("txmq").option("url", url).option("topic", "orders") \
        .mode("append").save()

`topic` and `topicPattern` read messages, `letters` the dead letters of consumer groups.
The messages of a batch are fixed when a frame's first action is planned: up to the
published ends of that moment, or up to an offset or a time. Offsets are JSON,
{"orders": {"0": 23}}. A partition that is left out is read from its first message to
its published end. The option `columns`, or a schema given with `.schema(...)`, chooses
columns; the others are not decoded.

Of several logs that are listed together all are read. The option `log` chooses one of
them, and a column of this name tells which.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from txmq.errors import ConfigError
from txmq_spark.source.arrow_letters import LETTERS
from txmq_spark.source.arrow_messages import MESSAGES
from txmq_spark.source.letter_reading import FilteringLetterReader, LetterReader
from txmq_spark.source.logs import LOG
from txmq_spark.source.message_reading import FilteringMessageReader, MessageReader
from txmq_spark.source.message_stream import LetterStream, MessageStream
from txmq_spark.source.options import (
    ReadOptions,
    parse_read_options,
    parse_write_options,
    require_batch,
    require_stream,
)
from txmq_spark.source.stream_writing import EpochWriter
from txmq_spark.source.writing import JobWriter

MESSAGE_TYPES: Final = from_arrow_schema(MESSAGES.append(LOG))
LETTER_TYPES: Final = from_arrow_schema(LETTERS.append(LOG))
FILTER_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


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
        require_batch(options)
        names = _chosen(schema, _types(options))
        filtering = _takes_filters(options)
        if options.letters:
            return (FilteringLetterReader if filtering else LetterReader)(options, names)
        return (FilteringMessageReader if filtering else MessageReader)(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        options = parse_read_options(self.options)
        require_stream(options)
        names = _chosen(schema, _types(options))
        return (LetterStream if options.letters else MessageStream)(options, names)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  # Spark's signature
        return JobWriter.for_schema(parse_write_options(self.options), schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802  # Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001  # Spark's signature
    ) -> DataSourceStreamWriter:
        options = parse_write_options(self.options)
        return EpochWriter.for_schema(options, schema, overwrite=overwrite)


def _takes_filters(options: ReadOptions) -> bool:
    """Return True if Spark is about to hand filters to the reader, and may.

    With spark.sql.python.filterPushdown.enabled, Spark runs a worker of its own for
    that. Without it, Spark 4.3 refuses each reader that could take filters.

    It reads all later queries of a frame with the filters of the one that it planned
    last (tried with 4.3.0, 2026-11-22; docs/decisions/0142). So a frame has to ask.
    """
    if not options.push_filters:
        return False
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return FILTER_WORKER in sys.modules or getattr(main, "name", "") == FILTER_WORKER


def _types(options: ReadOptions) -> StructType:
    """Return the columns that the options choose. Raises ConfigError."""
    known = LETTER_TYPES if options.letters else MESSAGE_TYPES
    unknown = [name for name in options.columns if name not in known.names]
    if unknown:
        raise ConfigError(
            "columns", f"there is no column {unknown[0]!r}", hint=", ".join(known.names)
        )
    return StructType([known[name] for name in options.columns or known.names])


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
