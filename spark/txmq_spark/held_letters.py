"""The messages of letters that plans of the broker hold, read in bulk by their places.

Tasks have the places of a plan in their order, so each reads its part of the log once.
What comes is batches, as in a read of topics: no letter is an object of Python. The
letters that are not read leave their plan: what it holds in the end was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from txmq_spark.arrow_messages import HEADER_CELLS, OffsetRange, record_batches
from txmq_spark.broker_link import BrokerLink
from txmq_spark.broker_plans import PAGE
from txmq_spark.letter_evidence import LETTER, PLACE

WAITS: Final = "waits"  # a column of places: messages of the letter's key wait behind it
OPERATOR: Final = "txmq-spark"
UNREAD: Final = "its message was not sent: it cannot be read, or others of its key wait for it"
MESSAGE: Final = [*PLACE, "stored_at", "key", "tag", HEADER_CELLS, "body"]
SCHEMA: Final = (
    "`group` string, topic string, partition int, offset bigint, stored_at timestamp, key string,"
    f" tag string, {HEADER_CELLS} binary, body binary"
)


def held_letters(places: DataFrame, url: str, plans: Mapping[str, str]) -> DataFrame:
    """Return the letters at these places with their messages, as far as the broker's
    plans hold them; `plans` are their names by group.

    A letter whose message is damaged is left out, and so is one that `waits`.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                for run in _runs(batch):
                    yield from _read(link, plans, run)

    ordered = places.select(*LETTER, WAITS).sortWithinPartitions(*LETTER)
    return ordered.mapInArrow(read, SCHEMA)


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
    offsets, waits = places.column("offset"), places.column(WAITS)
    wanted, left = offsets.filter(pc.invert(waits)), [offsets.filter(waits)]
    if len(wanted):
        at, first, last = 0, wanted[0].as_py(), wanted[-1].as_py()
        span = OffsetRange(topic, partition, first, last + 1)
        for batch in record_batches(link.held_letters(plans[group], span), span, MESSAGE):
            rows = batch.column("offset")
            end = int(np.searchsorted(wanted.to_numpy(), rows[-1].as_py(), "right"))
            here, at = wanted.slice(at, end - at), end
            if not here.equals(rows):
                left.append(here.filter(pc.invert(pc.is_in(here, rows))))
                batch = batch.filter(pc.is_in(rows, here))  # noqa: PLW2901  # what is wanted of it
            groups = pa.repeat(pa.scalar(group, pa.string()), batch.num_rows)
            columns = {"group": groups, **dict(zip(MESSAGE, batch.columns, strict=True))}
            yield pa.RecordBatch.from_pydict(columns)
        left.append(wanted.slice(at))
    _leave(link, plans[group], topic, partition, [one for part in left for one in part.to_pylist()])


def _leave(link: BrokerLink, plan: str, topic: str, partition: int, offsets: list[int]) -> None:
    """Take letters that are not sent out of the plan."""
    for first in range(0, len(offsets), PAGE):
        letters = [(topic, partition, offset) for offset in offsets[first : first + PAGE]]
        args = {"letters": letters, "operator": OPERATOR, "reason": UNREAD}
        link.call("plan.leave", name=plan, **args)
