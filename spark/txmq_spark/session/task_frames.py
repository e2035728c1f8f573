"""Frames whose tasks read their rows themselves, from a broker or a database, and the
tasks of frames with few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Piece = TypeVar("Piece")


def task_frame(
    spark: SparkSession,
    pieces: Sequence[Piece],
    read: Callable[[Piece], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    *,
    few: bool = False,
) -> DataFrame:
    """Return the rows that `read` yields for each piece of work. One task reads each
    piece; `few`: one reads all.
    """

    def read_all(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                yield from read(pieces[number])

    tasks = 1 if few else max(1, len(pieces))
    return spark.range(0, len(pieces), 1, tasks).mapInArrow(read_all, schema)


def gathered(frame: DataFrame, *, few: bool) -> DataFrame:
    """Return a frame in one task where it has few rows. Spark joins and counts such
    frames without exchanges, each of which is a stage to plan and to wait for.
    """
    return frame.coalesce(1) if few else frame
