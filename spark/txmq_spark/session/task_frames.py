"""Frames whose tasks read their rows themselves, from a broker or a database."""

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
) -> DataFrame:
    """Return the rows that `read` yields for each piece of work, of which each is one
    task.
    """

    def read_all(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                yield from read(pieces[number])

    tasks = max(1, len(pieces))
    return spark.range(0, len(pieces), 1, tasks).mapInArrow(read_all, schema)
