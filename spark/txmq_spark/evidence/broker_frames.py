"""Letters of groups, and the messages of their topics, as frames up to the published
ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping as Tables
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from txmq_spark.database.mapping import Mapping, mistake_column, version_column
from txmq_spark.evidence.inputs import Inputs
from txmq_spark.evidence.letter_evidence import token_column
from txmq_spark.session.task_frames import task_frame
from txmq_spark.source.arrow_letters import LETTERS
from txmq_spark.source.arrow_messages import MESSAGES
from txmq_spark.source.letter_reading import LetterReader
from txmq_spark.source.message_reading import MessageReader
from txmq_spark.source.options import ReadOptions, parse_read_options

ERROR_CHARACTERS: Final = 200  # of the last line of a letter's error
LOG_COLUMNS: Final = ("topic", "partition", "offset", "message_id", "key")
Ends = Tables[str, Sequence[int]]  # of topics


def log_frame(spark: SparkSession, inputs: Inputs, mapping: Mapping) -> DataFrame:
    """Return the messages of the log up to the ends, without bodies."""
    reader = _log_reader(spark, inputs, inputs.groups[0].log_id, inputs.ends)
    read = _frame_of(spark, reader, reader.partitions(), MESSAGES, LOG_COLUMNS)
    return read.withColumn("about", mapping.about())


def elsewhere_frame(spark: SparkSession, inputs: Inputs, mapping: Mapping) -> DataFrame | None:
    """Return the messages of these topics in other logs, as `log_frame` does; None =
    there are no others.
    """
    readers = [
        _log_reader(
            spark,
            inputs,
            survey.log.log_id,
            {name: bounds.ends for name, bounds in survey.topics.items()},
        )
        for _place, survey in inputs.others
        if survey.topics
    ]
    if not readers:
        return None
    tasks = [task for reader in readers for task in reader.partitions()]
    read = _frame_of(spark, readers[0], tasks, MESSAGES, LOG_COLUMNS)
    return read.withColumn("about", mapping.about())


def _log_reader(spark: SparkSession, inputs: Inputs, log_id: str, all_ends: Ends) -> MessageReader:
    ends = {topic: dict(enumerate(ends)) for topic, ends in all_ends.items()}
    asked = {"topic": ",".join(ends), "endingOffsets": json.dumps(ends), "log": log_id}
    return MessageReader(_read_options(spark, inputs, asked), LOG_COLUMNS)


def letter_frame(spark: SparkSession, inputs: Inputs, mapping: Mapping) -> DataFrame:
    """Return the open letters of messages below the ends, with times as numbers."""
    version = mapping.version
    heavy = {"body": "json:", "headers": "header:"}
    names = [name for name in LETTERS.names if (version or "").startswith(heavy.get(name, ""))]
    if not inputs.has_schemas:  # bodies are not read without a need
        names.remove("unfit")
    groups = ",".join(group.name for group in inputs.groups)
    asked = {"letters": groups, "log": inputs.groups[0].log_id}
    reader = LetterReader(_read_options(spark, inputs, asked), names)
    letters = _frame_of(spark, reader, reader.partitions(), LETTERS, names)
    known = letters.where(f.col("offset") < _ends(inputs))
    column = version_column(version)
    none = f.lit(None).cast("bigint")
    known = known.withColumn("version", none if column is None else column).withColumns(
        {
            "mistake": f.coalesce(mistake_column(version), _unfit(letters)),
            "stored_at": f.unix_micros("stored_at"),
            "dead_at": f.unix_micros("dead_at"),
            "reserved": f.col("reserved_by").isNotNull(),
            "token": token_column("message_id"),
            "error": _last_line("error_text"),
            "about": mapping.about(),
        }
    )
    return known.drop("unfit", "body", "headers", "error_text", "reserved_by", "damaged")


def _read_options(spark: SparkSession, inputs: Inputs, asked: dict[str, str]) -> ReadOptions:
    least = str(spark.sparkContext.defaultParallelism)
    return parse_read_options({"url": inputs.link.url, "minPartitions": least, **asked})


def _frame_of(
    spark: SparkSession,
    reader: LetterReader | MessageReader,
    tasks: Sequence[InputPartition],
    schema: pa.Schema,
    names: Sequence[str],
) -> DataFrame:
    """Return what a reader of the data source reads, planned by this process: Spark
    starts one of its own for each step of that.
    """
    types = from_arrow_schema(pa.schema([schema.field(name) for name in names]))
    return task_frame(spark, tasks, reader.read, types)


def _ends(inputs: Inputs) -> Column:
    """Return the published end of a row's partition; null = its topic is not read."""
    known = f.from_json(f.lit(json.dumps(inputs.ends)), "map<string, array<bigint>>")
    return f.get(f.try_element_at(known, f.col("topic")), f.col("partition"))


def _unfit(letters: DataFrame) -> Column:
    """Return why a body does not fit the schema of its topic; null = it does."""
    if "unfit" not in letters.columns:
        return f.lit(None).cast("string")
    mistake = f.left("unfit", f.lit(ERROR_CHARACTERS))
    return f.concat(f.lit("its body does not fit the schema of its topic: "), mistake)


def _last_line(column: str) -> Column:
    line = f.substring_index(f.rtrim(f.regexp_replace(column, r"\s+$", "")), "\n", -1)
    return f.left(line, f.lit(ERROR_CHARACTERS))
