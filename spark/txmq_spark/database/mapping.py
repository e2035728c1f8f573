"""Mapping of messages to the tables of the business: a small file in TOML or JSON.

version = "header:version"            # where a message has the version of its key
applied = "SELECT id AS key, version FROM billed"

[[table]]
name = "public.orders"
key = "id"                            # the column with the keys of messages
version = "version"
token = "written_by"                  # the token of the transaction that wrote a row
topics = ["orders"]                   # without it: of all topics that no table names
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, ValidationError
from pyspark.sql import Column
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq.errors.validation import first_mistake
from txmq.model.schemas.bodies import read_json
from txmq.wire.json import WireModel
from txmq_spark.database.snapshot import DatabaseSnapshot, table_columns

ColumnName = Annotated[str, Field(min_length=1, max_length=63)]
WHOLE_NUMBERS: Final = ("smallint", "integer", "bigint")
TOKEN_TYPES: Final = ("uuid", "text", "character varying", "character")
LARGEST_PARSED: Final = 1 << 20  # bytes of a body in which a version is looked for
HINT: Final = "docs: spark/README.md, Reconcile"


class BusinessTable(WireModel):
    """A table of the producer with the rows that messages are about; names of its
    columns.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", populate_by_name=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    key: ColumnName
    version: ColumnName | None = None
    token: ColumnName | None = None  # of the transaction that wrote the row, as text or uuid
    topics: Annotated[tuple[str, ...], Field(strict=False)] = ()


class Mapping(WireModel):
    """The tables that messages are about, what consumers have applied, and where a
    message has its version.
    """

    tables: Annotated[tuple[BusinessTable, ...], Field(alias="table", strict=False)] = ()
    applied: str | None = None  # a query
    version: str | None = None  # header:NAME or json:PATH

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", populate_by_name=True)

    def about(self) -> Column:
        """Return the number of the table that a row of `topic` is about; null = of
        none.
        """
        rest = [number for number, table in enumerate(self.tables) if not table.topics]
        other = f.lit(rest[0] if rest else None).cast("int")
        named = [(number, table) for number, table in enumerate(self.tables) if table.topics]
        return reduce(
            lambda otherwise, one: f.when(
                f.col("topic").isin(*one[1].topics), f.lit(one[0])
            ).otherwise(otherwise),
            named,
            other,
        )

    def of_topics(self, read: Collection[str]) -> Mapping:
        """Return the mapping with the tables that rows of these topics are about."""
        tables = tuple(
            table for table in self.tables if not table.topics or set(table.topics) & set(read)
        )
        return self.model_copy(update={"tables": tables})

    def partly_read(self, read: Collection[str]) -> list[int]:
        """Return the numbers of the tables that have topics besides these. That one of
        their keys has no message in these topics tells nothing.
        """
        tables = enumerate(self.tables)
        return [number for number, table in tables if not set(read).issuperset(table.topics)]

    def check(self, snapshot: DatabaseSnapshot) -> None:
        """Compare the columns with the database.

        Raises SchemaMissing for a missing table, ConfigError for a wrong column.
        """
        for table in self.tables:
            there = table_columns(snapshot, table.name)
            for column in filter(None, (table.key, table.version, table.token)):
                if column not in there:
                    raise ConfigError(
                        f"table {table.name}",
                        f"it has no column {column}, only {', '.join(there)}",
                        hint="name a column of it",
                    )
            if table.version and there[table.version] not in WHOLE_NUMBERS:
                raise ConfigError(
                    f"table {table.name}",
                    f"column {table.version} is of type {there[table.version]}, and a version is"
                    " a whole number",
                    hint=f"use a column of type {', '.join(WHOLE_NUMBERS)}, or none",
                )
            if table.token and there[table.token] not in TOKEN_TYPES:
                raise ConfigError(
                    f"table {table.name}",
                    f"column {table.token} is of type {there[table.token]}, and a token is a uuid",
                    hint="use a column of type uuid or text, or none",
                )


def read_mapping(path: Path) -> Mapping:
    """Read a mapping file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = read_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", hint="name a file in TOML or JSON"
        ) from error
    except ValueError as error:  # of either parser
        raise ConfigError(str(path), f"is no mapping: {error}", hint=HINT) from error
    return checked_mapping(str(path), tree)


def checked_mapping(where: str, tree: Any) -> Mapping:  # noqa: ANN401  # from a file
    """Return a mapping whose parts fit together. Raises ConfigError."""
    try:
        mapping = Mapping.model_validate(tree)
    except ValidationError as error:
        place, reason = first_mistake(error, unit="setting")
        raise ConfigError(f"{where}: {'.'.join(place)}", reason, hint=HINT) from None
    check_version(mapping.version)
    if sum(not table.topics for table in mapping.tables) > 1:
        raise ConfigError(
            where, "two tables name no topics", hint="give each its topics: topics = [...]"
        )
    for topic, count in Counter(t for table in mapping.tables for t in table.topics).items():
        if count > 1:
            raise ConfigError(
                where, f"topic {topic} is of {count} tables", hint="name it for one of them"
            )
    return mapping


def check_version(source: str | None) -> None:
    """Raise ConfigError for what is no source of a version: `header:NAME`, or
    `json:PATH` into the body. There need be no session of Spark yet.
    """
    kind, _, where = (source or "").partition(":")
    if source and not (kind in ("header", "json") and where):
        message = f"invalid source {source!r} of the version"
        raise ConfigError("version", message, hint="use header:NAME or json:PATH")


def version_column(source: str | None) -> Column | None:
    """Return the expression for the version of a message. Raises ConfigError."""
    check_version(source)
    if not source:
        return None
    kind, _, where = source.partition(":")
    if kind == "header":
        return f.col("headers").getItem(where).try_cast("bigint")
    text = f.try_validate_utf8(f.col("body").cast("string"))
    small = f.length("body") <= LARGEST_PARSED
    return f.when(small, f.get_json_object(text, f"$.{where}").try_cast("bigint"))


def mistake_column(source: str | None) -> Column:
    """Return why a letter's message cannot be judged; null = it can."""
    damaged = f.when(
        f.col("damaged").isNotNull(), f.concat(f.lit("its message is damaged: "), "damaged")
    )
    if not source:
        return damaged
    if source.startswith("json:"):
        damaged = damaged.when(
            f.length("body") > LARGEST_PARSED,
            f.format_string("its body of %d bytes is too large to be searched", f.length("body")),
        )
    return damaged.when(f.col("version").isNull(), f.lit("its version cannot be read"))
