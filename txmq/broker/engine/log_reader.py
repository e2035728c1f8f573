"""Batches read back from the log, as far as readers may see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.batch.header import PREFIX, compute_checksum
from txmq.core.state import visibility
from txmq.errors import CorruptRecord
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t
from txmq.store.log.decoder import Damage
from txmq.store.tables import ENTRY_KEY, BatchEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from txmq.core.events.base import LogSpan
    from txmq.core.state.state import State
    from txmq.store.log.log import Log

log = structlog.get_logger()
NOT_READ = b""
LOST_BATCH = "the message was lost to a repair of the log"
READ_OVER_BYTES = 16 << 10  # of other partitions: cheaper to read than another call
# of several batches in one call: to separate them is to copy them
RUN_BYTES = 128 << 10


class PublishedBatch(NamedTuple):
    """A published batch: its first offset, and its entry with the position in the
    log.
    """

    base: int
    entry: BatchEntry


def published_batches(
    state: State, topic_id: int, partition: int, offset: int, durable: int
) -> Iterator[PublishedBatch]:
    """Return the visible batches, beginning with the one that holds `offset`. Lost
    ones are left out.
    """
    start, stop = ENTRY_KEY.pack(topic_id, partition, 0), ENTRY_KEY.pack(topic_id, partition + 1, 0)
    here = ENTRY_KEY.pack(topic_id, partition, offset + 1)
    first = next(iter(state.entries.range(start, here, reverse=True)), None)
    end = visibility.visible_end(state, topic_id, partition, durable)
    for key, row in state.entries.range(here if first is None else first[0], stop):
        entry = BatchEntry._make(row)
        base = ENTRY_KEY.unpack(key)[2]
        if entry.visible_at > durable or base >= end:
            return
        if entry.length and offset < base + entry.count:
            yield PublishedBatch(base, entry)


def visible_end(state: State, topic_id: int, partition: int, durable: int) -> int:
    """Return the offset after the last visible message."""
    first = state.topics_by_id[topic_id].start_offsets[partition]
    end = visibility.visible_end(state, topic_id, partition, durable)
    if first == end:  # most partitions of very many are empty
        return first
    start, stop = ENTRY_KEY.pack(topic_id, partition, 0), ENTRY_KEY.pack(topic_id, partition, end)
    for key, row in state.tables[t.ENTRIES].range(start, stop, reverse=True):
        entry = BatchEntry._make(row)
        if entry.visible_at <= durable:
            return int(ENTRY_KEY.unpack(key)[2]) + entry.count
    return first


def read_spans(store: Log, places: Iterable[tuple[int, int]]) -> list[bytes]:
    """Return the bytes at (position, length), in the given order. Small neighbours in
    the log are read as one run.
    """
    out: list[bytes] = []
    for span in _runs(places):
        try:
            out += _read_run(store, span)
        except CorruptRecord:  # perhaps in the bytes between them
            for place in span:
                out += _read_run(store, [place])
    return out


def _read_run(store: Log, span: list[tuple[int, int]]) -> list[bytes]:
    start = span[0][0]
    data = store.read(start, span[-1][0] + span[-1][1] - start)
    return [data[position - start : position - start + length] for position, length in span]


def read_batches(store: Log, places: Iterable[tuple[int, int]]) -> list[bytes]:
    """Return the batches at (position, length), in the given order, each verified:
    durable bytes may have rotted.

    Raises CorruptRecord; the damage is quarantined by then. A batch without bytes was
    lost to a repair.
    """
    wanted = list(places)
    found = read_spans(store, wanted)
    for (position, length), data in zip(wanted, found, strict=True):
        if not length:
            raise CorruptRecord(_segment_path(store, position), position, LOST_BATCH)
        if compute_checksum(data) != PREFIX.unpack_from(data)[1]:
            raise _quarantine(
                store,
                Damage(
                    _segment_path(store, position), position, position + length, "a damaged batch"
                ),
            )
    return found


def read_before_damage(
    store: Log, requests: Sequence[tuple[TopicPartition, LogSpan | None]]
) -> tuple[list[bytes | None], set[TopicPartition]]:
    """Return, of each partition, the batches before its first damaged one: every
    delivery of messages follows this rule.

    The batches are in the given order: b"" without a span; None for a damaged batch
    and for all behind it in its partition. The second result is the set of partitions
    with damage. Each span is read once.
    """
    spans = dict.fromkeys(span for _partition, span in requests if span is not None)
    try:
        found: dict[LogSpan, bytes | None] = dict(
            zip(spans, read_batches(store, spans), strict=True)
        )
    except CorruptRecord:
        found = {span: _read_or_none(store, span) for span in spans}
    damaged: set[TopicPartition] = set()
    batches: list[bytes | None] = []
    for partition, span in requests:
        data = NOT_READ if span is None else found[span]
        if data is None:
            damaged.add(partition)
        batches.append(None if partition in damaged else data)
    return batches, damaged


def _read_or_none(store: Log, span: LogSpan) -> bytes | None:
    try:
        return read_batches(store, [span])[0]
    except CorruptRecord:
        return None


def _quarantine(store: Log, damage: Damage) -> CorruptRecord:
    store.quarantine([damage])
    log.error("log.damaged", **damage._asdict())
    return CorruptRecord(damage.path, damage.position, damage.reason)


def _segment_path(store: Log, position: int) -> str:
    return next(segment.path for segment in reversed(store.segments()) if segment.first <= position)


def _runs(places: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    span: list[tuple[int, int]] = []
    start = end = 0
    for place in places:
        position, length = place
        if span and not (
            end <= position <= end + READ_OVER_BYTES and position + length - start <= RUN_BYTES
        ):
            yield span
            span = []
        if not span:
            start = position
        span.append(place)
        end = position + length
    if span:
        yield span
