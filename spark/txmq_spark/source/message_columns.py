"""Rows of a DataFrame as messages: their columns, and how they enter a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType

from txmq.batch.cells import header_cell, text_too_long
from txmq.client.protocol.sender.rows import micros_now
from txmq.errors import ConfigError
from txmq.model import limits
from txmq_spark.source.arrow_rows import SCHEMA, ArrowRows, binary_column, empty_column, longest_of

if TYPE_CHECKING:
    from txmq.client.blocking.transaction.jobs import JobBundle

TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "body": BinaryType(),
    "key": StringType(),
    "tag": StringType(),
    "headers": MapType(StringType(), StringType()),
}
TEXT_LIMITS: Final = {"key": limits.KEY, "tag": limits.TAG}
HINT: Final = (
    "select body binary, and optionally key, tag, topic string, headers map<string,string>"
)


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raise ConfigError where rows of this schema are not messages."""
    for field in schema:
        expected = TYPES.get(field.name)
        if expected is None or not _same(field.dataType, expected):
            what = f"{field.name} {field.dataType.simpleString()}"
            raise ConfigError("columns", f"a message has no column {what}", hint=HINT)
        if schema.names.count(field.name) > 1:
            raise ConfigError("columns", f"there are two columns {field.name}", hint=HINT)
    if "body" not in schema.names:
        raise ConfigError("columns", "a message needs a body", hint=HINT)
    if ("topic" in schema.names) == (topic is not None):
        raise ConfigError(
            "topic",
            "name the topic by either an option or a column",
            hint='option("topic", "orders")',
        )


def _same(found: DataType, expected: DataType) -> bool:
    if isinstance(expected, MapType):
        return isinstance(found, MapType) and (found.keyType, found.valueType) == (
            expected.keyType,
            expected.valueType,
        )
    return found == expected


def add_rows(group: JobBundle, batch: pa.RecordBatch, topic: str | None) -> int:
    """Add the rows to the bundle; return their number. `topic` None: a column names
    the topic of each.

    Raises ConfigError where a row is no message, MessageTooLarge, LocalProtocolError.
    """
    if topic is not None:
        _send(group, topic, batch)
        return int(batch.num_rows)
    topics = batch.column("topic")
    for name in _listed(pc.unique(topics), "topic"):
        if name is None:
            raise ConfigError(
                "columns", "a row has no topic", hint="filter such rows out, or fill in a topic"
            )
        _send(group, name, batch.filter(pc.equal(topics, name)))
    return int(batch.num_rows)


def _send(group: JobBundle, topic: str, batch: pa.RecordBatch) -> None:
    if batch.column("body").null_count:
        raise ConfigError(
            "columns", "a row has no body", hint="filter such rows out, or send empty bodies"
        )
    if not batch.num_rows:
        return
    columns = [
        binary_column(batch.column("body")),
        *(_cells(batch, name, most) for name, most in TEXT_LIMITS.items()),
        _header_cells(batch),
    ]
    rows = ArrowRows(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), micros_now())
    group.send_rows(topic, rows, rows.size)


def _cells(batch: pa.RecordBatch, name: str, most: int) -> pa.Array:
    """Return a column of texts as a batch of messages has it. Raises ConfigError where
    a text is none, LocalProtocolError where it is too long.
    """
    if name not in batch.schema.names:
        return empty_column(batch.num_rows)
    column = batch.column(name)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        _listed(column, name)  # says which
        raise
    cells = binary_column(column)
    if (longest := longest_of(cells)) > most:
        raise text_too_long(name, longest, most)
    return cells


def _header_cells(batch: pa.RecordBatch) -> pa.Array:
    headers = batch.column("headers") if "headers" in batch.schema.names else None
    if headers is None or headers.null_count == batch.num_rows:
        return empty_column(batch.num_rows)
    listed = _listed(headers, "headers")
    return pa.array([header_cell(dict(pairs or ())) for pairs in listed], pa.binary())


def _listed(column: pa.Array, name: str) -> list[Any]:
    """Return a column as Python values. Raises ConfigError where a text is none.

    A string of Spark may have any bytes, as of a cast from binary.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise ConfigError(
            "columns",
            f"a row has a {name} that is no UTF-8: {error.object[:80]!r}",
            hint="use base64(column) for what is no text",
        ) from None
