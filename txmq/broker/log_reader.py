"""Reading batches back from the log for whoever may see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.batch.header import PREFIX, checksum
from txmq.core.state import visibility
from txmq.errors import CorruptRecord
from txmq.store import tables as t
from txmq.store.scan import Damage
from txmq.store.tables import ENTRY_KEY, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from txmq.core.state.state import State
    from txmq.store.log import Log

log = structlog.get_logger()
Spot = tuple[int, int]  # topic id, partition
Place = tuple[int, int]  # position in the log, length
NOT_READ = b""
GAP = 16 * 1024  # bytes of other partitions worth reading over to save a call
SPAN = 128 << 10  # and the most that one call reads of several: to take that apart is to copy it


class Found(NamedTuple):
    """A published batch: its place in the topic and in the log."""

    base: int
    entry: Entry


def published(
    state: State, topic_id: int, partition: int, offset: int, durable: int
) -> Iterator[Found]:
    """The batches from the one that holds `offset` on, as far as readers may see."""
    start, stop = ENTRY_KEY.pack(topic_id, partition, 0), ENTRY_KEY.pack(topic_id, partition + 1, 0)
    here = ENTRY_KEY.pack(topic_id, partition, offset + 1)
    first = next(iter(state.entries.range(start, here, reverse=True)), None)
    end = visibility.end(state, topic_id, partition, durable)
    for key, row in state.entries.range(here if first is None else first[0], stop):
        entry = Entry._make(row)
        base = ENTRY_KEY.unpack(key)[2]
        if entry.visible_at > durable or base >= end:
            return
        if offset < base + entry.count:
            yield Found(base, entry)


def end_of(state: State, topic_id: int, partition: int, durable: int) -> int:
    """The offset after the last message that readers may see."""
    start = ENTRY_KEY.pack(topic_id, partition, 0)
    stop = ENTRY_KEY.pack(topic_id, partition, visibility.end(state, topic_id, partition, durable))
    for key, row in state.tables[t.ENTRIES].range(start, stop, reverse=True):
        entry = Entry._make(row)
        if entry.visible_at <= durable:
            return int(ENTRY_KEY.unpack(key)[2]) + entry.count
    return state.topics_by_id[topic_id].firsts[partition]


def offset_at(state: State, topic_id: int, partition: int, time: int) -> int:
    """The first offset stored at or after `time`; the end where there is none. Times
    grow with offsets, so this bisects.
    """
    low, high = (
        state.topics_by_id[topic_id].firsts[partition],
        visibility.end(state, topic_id, partition),
    )
    start = ENTRY_KEY.pack(topic_id, partition, 0)
    while low < high:
        middle = (low + high) // 2
        key, row = next(
            iter(
                state.entries.range(
                    start, ENTRY_KEY.pack(topic_id, partition, middle + 1), reverse=True
                )
            )
        )
        entry, base = Entry._make(row), int(ENTRY_KEY.unpack(key)[2])
        if entry.stored_at < time:
            low = base + entry.count
        else:
            high = base
    return low


def read(store: Log, places: Iterable[tuple[int, int]]) -> list[bytes]:
    """The bytes at (position, length), in the order given; small neighbours in the log
    are read in one go.
    """
    out: list[bytes] = []
    for span in _spans(places):
        try:
            out += _read_span(store, span)
        except CorruptRecord:  # of which there may be some between them
            for place in span:
                out += _read_span(store, [place])
    return out


def _read_span(store: Log, span: list[tuple[int, int]]) -> list[bytes]:
    start = span[0][0]
    data = store.read(start, span[-1][0] + span[-1][1] - start)
    return [data[position - start : position - start + length] for position, length in span]


def read_batches(store: Log, places: Iterable[tuple[int, int]]) -> list[bytes]:
    """The batches at (position, length), in the order given, each checked: what was
    durable may have rotted since.

    Raises CorruptRecord; what is damaged is quarantined by then.
    """
    wanted = list(places)
    found = read(store, wanted)
    for (position, length), data in zip(wanted, found, strict=True):
        if checksum(data) != PREFIX.unpack_from(data)[1]:
            raise _rotten(
                store,
                Damage(_path(store, position), position, position + length, "a damaged batch"),
            )
    return found


def before_damage(
    store: Log, wanted: Sequence[tuple[Spot, Place | None]]
) -> tuple[list[bytes | None], set[Spot]]:
    """The one rule for whoever gives out messages: of each partition what comes before
    its first damaged batch.

    The batches in the order given, b"" where no place is; None for a damaged one and
    for all behind it in its partition; and the partitions in which there is damage.
    Each place is read once.
    """
    places = dict.fromkeys(place for _spot, place in wanted if place is not None)
    try:
        found: dict[Place, bytes | None] = dict(
            zip(places, read_batches(store, places), strict=True)
        )
    except CorruptRecord:
        found = {place: _undamaged(store, place) for place in places}
    damaged: set[Spot] = set()
    batches: list[bytes | None] = []
    for spot, place in wanted:
        data = NOT_READ if place is None else found[place]
        if data is None:
            damaged.add(spot)
        batches.append(None if spot in damaged else data)
    return batches, damaged


def _undamaged(store: Log, place: Place) -> bytes | None:
    try:
        return read_batches(store, [place])[0]
    except CorruptRecord:
        return None


def _rotten(store: Log, damage: Damage) -> CorruptRecord:
    store.quarantine([damage])
    log.error("log.damaged", **damage._asdict())
    return CorruptRecord(damage.path, damage.position, damage.reason)


def _path(store: Log, position: int) -> str:
    return next(segment.path for segment in reversed(store.segments()) if segment.first <= position)


def _spans(places: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    span: list[tuple[int, int]] = []
    start = end = 0
    for place in places:
        position, length = place
        if span and not (end <= position <= end + GAP and position + length - start <= SPAN):
            yield span
            span = []
        if not span:
            start = position
        span.append(place)
        end = position + length
    if span:
        yield span
