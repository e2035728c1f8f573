"""DataFrames as messages: one job, whose tasks store groups and whose one decision sends them all.

Each task stores what it gets as a group under a fresh token, undecided and invisible, and tells the driver the token.
The driver's commit is one decision that names the winning groups; a group that another attempt of the task stored, or
a task that was given up, is dropped by it. So a task that is tried again, a second copy of a slow one and a driver
that dies change nothing. With `idempotency_key` the job has a name: running it again meets the first run's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType

from txmq.errors import ConfigError
from txmq_spark.options import Writing

HEADERS: Final = MapType(StringType(), StringType())
TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "body": BinaryType(),
    "key": StringType(),
    "tag": StringType(),
    "headers": HEADERS,
}
HINT: Final = "select what shall be sent: body binary; and key, tag, topic string, headers map<string,string> if wanted"


@dataclass(frozen=True, slots=True)
class Stored(WriterCommitMessage):
    """What a task tells the driver: the token of its group, None where there was nothing to send."""

    token: str | None
    messages: int


class JobWriter(DataSourceArrowWriter):
    """Writes to topics. Made by the driver; `write` runs in its tasks."""

    def __init__(self, wanted: Writing) -> None:
        self._wanted = wanted

    @classmethod
    def planned(cls, wanted: Writing, schema: StructType, *, overwrite: bool) -> Self:
        """The writer for rows of this schema. Raises ConfigError where they are no messages."""
        if overwrite:
            raise ConfigError("mode", "a topic cannot be overwritten", hint='mode("append")')
        check_columns(schema, wanted.topic)
        return cls(wanted)

    def write(self, iterator: Any) -> Stored:
        return Stored(None, 0)


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raises ConfigError where rows of this schema are no messages."""
    for field in schema:
        wanted = TYPES.get(field.name)
        if wanted is None or not _same(field.dataType, wanted):
            what = f"{field.name} {field.dataType.simpleString()}"
            raise ConfigError("columns", f"a message has no column {what}", hint=HINT)
    if "body" not in schema.names:
        raise ConfigError("columns", "a message needs a body", hint=HINT)
    if ("topic" in schema.names) == (topic is not None):
        raise ConfigError("topic", "either an option or a column says where to send", hint='option("topic", "orders")')


def _same(found: DataType, wanted: DataType) -> bool:
    if isinstance(wanted, MapType) and isinstance(found, MapType):
        return isinstance(found.keyType, StringType) and isinstance(found.valueType, StringType)
    return type(found) is type(wanted)
