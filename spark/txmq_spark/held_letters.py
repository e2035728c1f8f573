"""The messages of letters that plans of the broker hold, read in bulk by their places.

Tasks have the places of a plan in their order, so each reads its part of the log once.
What comes is batches, as in a read of topics: no letter is an object of Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from txmq_spark.arrow_messages import HEADER_CELLS, OffsetRange, record_batches
from txmq_spark.broker_link import BrokerLink
from txmq_spark.letter_evidence import LETTER, PLACE

TASK_LETTERS: Final = 50_000  # letters for one task, about
MESSAGE: Final = [*PLACE, "stored_at", "key", "tag", HEADER_CELLS, "body"]
SCHEMA: Final = (
    "`group` string, topic string, partition int, offset bigint, stored_at timestamp, key string,"
    f" tag string, {HEADER_CELLS} binary, body binary"
)


def held_letters(places: DataFrame, url: str, plans: Mapping[str, str], letters: int) -> DataFrame:
    """Return the letters at these places, about `letters`, with their messages, as far
    as the broker's plans hold them; `plans` are their names by group.

    A letter whose message is damaged is left out.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                for run in _runs(batch):
                    yield from _read(link, plans, run)

    tasks = max(places.sparkSession.sparkContext.defaultParallelism, letters // TASK_LETTERS)
    ordered = places.select(*LETTER).repartitionByRange(tasks, *LETTER)
    return ordered.sortWithinPartitions(*LETTER).mapInArrow(read, SCHEMA)


def _runs(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the places of each partition, which are together."""
    start = 0
    ends = [pc.run_end_encode(batch.column(name)).run_ends.to_pylist() for name in LETTER[:3]]
    for end in sorted({end for column in ends for end in column}):
        yield batch.slice(start, end - start)
        start = end


def _read(
    link: BrokerLink, plans: Mapping[str, str], places: pa.RecordBatch
) -> Iterator[pa.RecordBatch]:
    group, topic, partition = (places.column(name)[0].as_py() for name in LETTER[:3])
    wanted = places.column("offset")
    first, last = wanted[0].as_py(), wanted[-1].as_py()
    offsets = OffsetRange(topic, partition, first, last + 1)
    for batch in record_batches(link.held_letters(plans[group], offsets), offsets, MESSAGE):
        found = batch.filter(pc.is_in(batch.column("offset"), wanted))
        groups = pa.repeat(pa.scalar(group, pa.string()), found.num_rows)
        columns = {"group": groups, **dict(zip(MESSAGE, found.columns, strict=True))}
        yield pa.RecordBatch.from_pydict(columns)
